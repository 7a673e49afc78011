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

	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/admit"
)

// Bounds of one connection: every pod of the cluster may reach the port.
const (
	// readTime bounds the reading of a request, which is a few lines.
	readTime = 2 * time.Second
	// writeTime bounds the writing of an answer of some 20 KiB to a slow client.
	writeTime = 15 * time.Second
	// longestHeader is many times as long as Prometheus' header.
	longestHeader = 8 << 10 // bytes
)

// errNeedsTLS refuses to serve the metrics, which name pods, to any pod of the cluster.
var errNeedsTLS = errors.New("beyond loopback they are served with TLS alone, to those who have the right: add --metrics-secure")

// serve answers Prometheus until ctx ends. If it cannot, it logs that, and the agent works anyway.
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
	if o.alive != nil {
		mux.HandleFunc("GET /healthz", answer(func() bool { return o.alive.State().Alive }))
		mux.HandleFunc("GET /readyz", answer(func() bool { return o.alive.State().Ready }))
	}
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: readTime, ReadTimeout: readTime, WriteTimeout: writeTime, IdleTimeout: readTime, MaxHeaderBytes: longestHeader,
	}
	if quiet, err := zap.NewStdLogAt(log, zapcore.DebugLevel); err == nil { // the server logs each broken connection, and any client can break one
		server.ErrorLog = quiet
	}
	server.SetKeepAlivesEnabled(false)                    // Prometheus asks once a minute or less
	context.AfterFunc(ctx, func() { _ = server.Close() }) // a client that loses its answer by this asks again
	go func() {
		if err := server.Serve(listener); ctx.Err() == nil {
			log.Error("metrics are served no more", zap.Error(err))
		}
	}()
}

// answer serves whether the agent is well to monitors, in one word: anyone who reaches the port may ask. Kubelet asks by the command health.
func answer(well func() bool) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if !well() {
			http.Error(w, "not ok", http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n")) // who does not wait for it asks again
	}
}

// listen opens the port: in plain text on loopback, or with TLS, for clients that the API server lets read metrics.
func (o *options) listen(ctx context.Context, metrics http.Handler, log *zap.Logger) (net.Listener, http.Handler, error) {
	if !o.metricsSecure && !loopback(o.metricsAddress) {
		return nil, nil, errNeedsTLS
	}
	var secure *tls.Config
	var limited *peers // before the first request
	if o.metricsSecure {
		client, err := o.client() // its own client, so that clients of the metrics use up none of the agent's requests
		if err != nil {
			return nil, nil, err
		}
		door, err := admit.New(admit.Options{Client: client, Admitted: func(peer string) { limited.admitted(peer) }, Log: log})
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
	limited = limitConnections(open)
	listener := net.Listener(limited)
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	return listener, metrics, nil
}

// loopback reports whether only this pod reaches the address. A name other than localhost may stand for any address.
func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}
