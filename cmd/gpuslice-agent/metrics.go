package main

import (
	"context"
	"net"
	"net/http"
	"time"

	"go.uber.org/zap"
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
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	context.AfterFunc(ctx, func() { _ = server.Close() }) // who is being answered asks again
	go func() {
		if err := server.Serve(listener); ctx.Err() == nil {
			log.Error("metrics are served no more", zap.Error(err))
		}
	}()
}
