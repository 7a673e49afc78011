package main

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpuslice/gpuslice/agent/admit"
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

// errInTheOpen is given where the metrics, which name pods, would be anybody's.
var errInTheOpen = errors.New("beyond loopback they are served with TLS alone, to those who have the right: add --metrics-secure")

// serve answers Prometheus until ctx ends. That it cannot is no reason to leave the node alone.
func (o *options) serve(ctx context.Context, metrics http.Handler, log *zap.Logger) {
	if o.metricsAddress == "" {
		return
	}
	listener, metrics, err := o.listen(ctx, metrics, log)
	if err != nil {
		log.Error("no metrics are served: choose another --metrics-address, or mend what is wrong", zap.Error(err))
		return
	}
	log.Info("serving metrics", zap.Stringer("address", listener.Addr()), zap.Bool("secure", o.metricsSecure))
	mux := http.NewServeMux()
	mux.Handle("GET "+admit.Path, metrics)
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: readTime, ReadTimeout: readTime, WriteTimeout: writeTime, IdleTimeout: readTime, MaxHeaderBytes: longestHeader,
	}
	if quiet, err := zap.NewStdLogAt(log, zapcore.DebugLevel); err == nil { // each broken connection is a line, and anyone can break one
		server.ErrorLog = quiet
	}
	server.SetKeepAlivesEnabled(false)                    // one answer a minute is worth no open connection
	context.AfterFunc(ctx, func() { _ = server.Close() }) // who is being answered asks again
	go func() {
		if err := server.Serve(listener); ctx.Err() == nil {
			log.Error("metrics are served no more", zap.Error(err))
		}
	}()
}

// listen opens the port, in plain text on loopback, or with TLS and for those whom the API server says to have the right.
func (o *options) listen(ctx context.Context, metrics http.Handler, log *zap.Logger) (net.Listener, http.Handler, error) {
	if !o.metricsSecure && !loopback(o.metricsAddress) {
		return nil, nil, errInTheOpen
	}
	var secure *tls.Config
	if o.metricsSecure {
		client, err := o.client() // whoever asks uses up none of the requests of the agent's own
		if err != nil {
			return nil, nil, err
		}
		door, err := admit.New(admit.Options{Client: client, Log: log})
		if err != nil {
			return nil, nil, err
		}
		shown := &certificate{dir: o.metricsCertDir, log: log}
		if secure, err = shown.config(); err != nil {
			return nil, nil, err
		}
		metrics = door.Before(metrics)
	}
	open, err := new(net.ListenConfig).Listen(ctx, "tcp", o.metricsAddress)
	if err != nil {
		return nil, nil, err
	}
	listener := net.Listener(limited(open))
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	return listener, metrics, nil
}

// loopback reports whether nobody outside of the pod reaches the address. A name but localhost may stand for any.
func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}
