package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"go.uber.org/zap"
)

// profileTime bounds the writing of an answer: a profile of the CPU takes as long as the client asks for, 30 seconds by default.
const profileTime = 5 * time.Minute

// errProfilesOnLoopback refuses to serve profiles to others: they are not asked for a token, and a profile costs the node CPU time.
var errProfilesOnLoopback = errors.New("profiles are served on loopback alone: set --pprof-address to 127.0.0.1:6060, and reach it by kubectl port-forward")

// serveProfiles serves Go's profiles of this process until ctx ends, if the user asks for them. If it cannot, it logs that, and the agent works
// anyway.
func (o *options) serveProfiles(ctx context.Context, log *zap.Logger) {
	if o.pprofAddress == "" {
		return
	}
	listener, err := listenForProfiles(ctx, o.pprofAddress)
	if err != nil {
		log.Error("no profiles are served: choose another --pprof-address", zap.Error(err))
		return
	}
	log.Info("serving profiles", zap.Stringer("address", listener.Addr()))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: readTime, ReadTimeout: readTime, WriteTimeout: profileTime, IdleTimeout: readTime, MaxHeaderBytes: longestHeader,
	}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	go func() {
		if err := server.Serve(listener); ctx.Err() == nil {
			log.Error("profiles are served no more", zap.Error(err))
		}
	}()
}

func listenForProfiles(ctx context.Context, address string) (net.Listener, error) {
	if !loopback(address) {
		return nil, errProfilesOnLoopback
	}
	open, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return limitConnections(open), nil
}
