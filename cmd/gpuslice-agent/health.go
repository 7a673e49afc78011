package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

const (
	// healthTimeout bounds the answer to a probe, a few bytes within one machine.
	healthTimeout = time.Second
	// healthRetry is the pause before the agent tries again to listen for probes, or to accept one.
	healthRetry = time.Second
	// longestHealth bounds an answer, which names one step.
	longestHealth = 16 << 10 // bytes
)

var errOtherUser = errors.New("the other end is of another user")

// health is the command that kubelet runs to probe the agent. It is no page at a port: any program that reaches a port can occupy it, and
// kubelet would then end the agent in the middle of a change.
func (o *options) health() *cobra.Command {
	var ready bool
	c := &cobra.Command{
		Use:   "health",
		Short: "Ask the agent that runs here whether its loop goes on; for kubelet's probes",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := o.askHealth(cmd.Context())
			switch {
			case err != nil:
				return fmt.Errorf("asking the agent how it is: %w", err)
			case !s.Alive || ready && !s.Ready:
				return errors.New(sanitize.Message(s.Says, sanitize.Longest))
			}
			out := &cli.Printer{W: cmd.OutOrStdout()}
			out.Printf("%s\n", s.Says)
			return out.Err
		},
	}
	c.Flags().BoolVar(&ready, "ready", false, "also fail before the agent has observed its node once")
	return c
}

// healthSocket is the address at which the agent that has this lock answers. It is an abstract address, which needs no file and
// ends with its process; no other pod reaches it if the agent's pod is not in the host's network.
func (o *options) healthSocket() string {
	sum := sha256.Sum256([]byte(o.lockFile))
	return "@gpuslice-agent-" + hex.EncodeToString(sum[:8])
}

// answerHealth answers probes until ctx ends. While another process of this network namespace has the address, such as the agent that this one
// waits for, that process answers them; answerHealth tries again until the address is free.
func (o *options) answerHealth(ctx context.Context, state func() report.LoopState, log *zap.Logger) {
	listener, err := o.listenHealth(ctx)
	if err != nil {
		log.Warn("another process answers the probes of this one until it ends: find the agent with the same --lock in this network namespace",
			zap.String("address", o.healthSocket()), zap.Duration("triedAgainEach", healthRetry), zap.Error(err))
	}
	go func() {
		for err != nil {
			select {
			case <-ctx.Done():
				return
			case <-time.After(healthRetry):
			}
			listener, err = o.listenHealth(ctx)
		}
		context.AfterFunc(ctx, func() { _ = listener.Close() })
		serveHealth(ctx, listener, state, log)
	}()
}

func (o *options) listenHealth(ctx context.Context) (net.Listener, error) {
	return new(net.ListenConfig).Listen(ctx, "unix", o.healthSocket())
}

func serveHealth(ctx context.Context, listener net.Listener, state func() report.LoopState, log *zap.Logger) {
	for {
		c, err := listener.Accept()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			log.Warn("answering a probe", zap.Error(err))
			select { // a lack of file descriptors, for instance, passes with time
			case <-ctx.Done():
			case <-time.After(healthRetry):
			}
			continue
		}
		if err := writeHealth(c, state()); err != nil {
			log.Debug("answering a probe", zap.Error(err))
		}
	}
}

func writeHealth(c net.Conn, s report.LoopState) error {
	defer c.Close()
	if err := ownUser(c); err != nil {
		return err
	}
	if err := c.SetDeadline(time.Now().Add(healthTimeout)); err != nil {
		return err
	}
	return json.NewEncoder(c).Encode(s)
}

func (o *options) askHealth(ctx context.Context) (s report.LoopState, err error) {
	ctx, cancel := context.WithTimeout(ctx, 3*healthTimeout)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "unix", o.healthSocket())
	if err != nil {
		return s, err
	}
	defer c.Close()
	if err := ownUser(c); err != nil {
		return s, err
	}
	if until, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(until); err != nil {
			return s, err
		}
	}
	return s, json.NewDecoder(io.LimitReader(c, longestHealth)).Decode(&s)
}

// ownUser makes sure that the other end is of the same user: any user may open an abstract address first.
func ownUser(c net.Conn) error {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return errOtherUser
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return err
	}
	var who *unix.Ucred
	failed := raw.Control(func(fd uintptr) { who, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	switch {
	case failed != nil:
		return failed
	case err != nil:
		return err
	case int(who.Uid) != os.Geteuid():
		return errOtherUser
	}
	return nil
}
