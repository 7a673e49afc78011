package main

import (
	"context"
	"net"
	"net/http"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Bounds of one connection: every pod of the cluster may reach the port.
const (
	// readTime is for a request, which is a few lines. One who says nothing for longer is not waited for.
	readTime = 2 * time.Second
	// writeTime is for an answer of some 20 KiB, to one who reads slowly.
	writeTime = 15 * time.Second
	// longestHeader is that of Prometheus, many times over.
	longestHeader = 8 << 10 // bytes
)

// serve answers Prometheus until ctx ends. That it cannot is no reason to leave the node alone.
func (o *options) serve(ctx context.Context, metrics http.Handler, log *zap.Logger) {
	if o.metricsAddress == "" {
		return
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", o.metricsAddress)
	if err != nil {
		log.Error("no metrics are served: choose another --metrics-address", zap.Error(err))
		return
	}
	log.Info("serving metrics", zap.Stringer("address", listener.Addr()))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: readTime, ReadTimeout: readTime, WriteTimeout: writeTime, IdleTimeout: readTime, MaxHeaderBytes: longestHeader,
	}
	if quiet, err := zap.NewStdLogAt(log, zapcore.DebugLevel); err == nil { // each broken connection is a line, and anyone can break one
		server.ErrorLog = quiet
	}
	server.SetKeepAlivesEnabled(false)                    // one answer a minute is worth no open connection
	context.AfterFunc(ctx, func() { _ = server.Close() }) // who is being answered asks again
	go func() {
		if err := server.Serve(limited(listener)); ctx.Err() == nil {
			log.Error("metrics are served no more", zap.Error(err))
		}
	}()
}
