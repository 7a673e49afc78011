package kubelet

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/creack/pty"
	"go.uber.org/zap"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

const (
	// administrators is the group of the API server's certificate for kubelets.
	administrators = "system:masters"
	// streamIdle and streamBegin are a real kubelet's: how long a stream may carry nothing, and how long it may take to begin.
	streamIdle, streamBegin = 4 * time.Hour, 30 * time.Second
	// logPeriod is between looks for more of a log that is followed.
	logPeriod = 200 * time.Millisecond
	// logTail is how much of a log is read for its last lines.
	logTail = 16 << 20
)

// server is the kubelet's own API on a free port of loopback, as far as kubectl logs, exec and port-forward need it.
type server struct {
	k    *Kubelet
	http *http.Server
	port int32
	work sync.WaitGroup
}

// startServer serves whoever has an administrator's certificate of the cluster, as its API server has one.
func (k *Kubelet) startServer(ctx context.Context) (*server, error) {
	// The API server does not check the names of kubelets: the node's own certificate serves here, too.
	pair, err := tls.X509KeyPair(k.Config.CertData, k.Config.KeyData)
	if err != nil {
		return nil, fmt.Errorf("serving the kubelet of %s: %w", k.Node, err)
	}
	clients := x509.NewCertPool()
	clients.AppendCertsFromPEM(k.Config.CAData) // without one, no one is let in
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(nodeAddress, "0"))
	if err != nil {
		return nil, fmt.Errorf("serving the kubelet of %s: %w", k.Node, err)
	}
	address, isTCP := listener.Addr().(*net.TCPAddr)
	if !isTCP {
		return nil, fmt.Errorf("serving the kubelet of %s: the listener has an address of type %T", k.Node, listener.Addr())
	}
	s := &server{k: k, port: int32(address.Port)}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /containerLogs/{namespace}/{pod}/{container}", s.logs)
	mux.HandleFunc("/exec/{namespace}/{pod}/{container}", s.exec)
	mux.HandleFunc("/portForward/{namespace}/{pod}", s.forward)
	s.http = &http.Server{
		Handler: administratorsOnly(mux), ReadHeaderTimeout: streamBegin, BaseContext: func(net.Listener) context.Context { return ctx },
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients},
		ErrorLog:  zap.NewStdLog(k.Log.Named("server")),
	}
	s.http.TLSNextProto = map[string]func(*http.Server, *tls.Conn, http.Handler){} // no HTTP/2, which has no upgrades
	s.work.Go(func() {
		if err := s.http.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			k.Log.Warn("kubelet no longer serves", zap.Error(err))
		}
	})
	return s, nil
}

func (s *server) stop() error {
	if s == nil {
		return nil
	}
	err := s.http.Close()
	s.work.Wait()
	return err
}

func administratorsOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(r.TLS.PeerCertificates[0].Subject.Organization, administrators) {
			http.Error(w, "this kubelet serves the API server alone", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// errNoProcess is the answer for a container of an unknown image.
var errNoProcess = errors.New("this container is simulated: no process runs in it, the node only says so")

// find finds a container that has run, and its worker.
func (s *server) find(r *http.Request) (*worker, *container, error) {
	namespace, pod, name := r.PathValue("namespace"), r.PathValue("pod"), r.PathValue("container")
	w := s.k.pods.find(namespace, pod)
	if w == nil {
		return nil, nil, fmt.Errorf("pod %s/%s is not on node %s", namespace, pod, s.k.Node)
	}
	for _, c := range w.containers {
		if c.spec.Name == name {
			return w, c, nil
		}
	}
	return nil, nil, fmt.Errorf("pod %s/%s has no container %s", namespace, pod, name)
}

// find is the worker of the pod of this name; nil if there is none.
func (p *podWatch) find(namespace, name string) *worker {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range p.workers {
		if pod := w.latest(); pod.Namespace == namespace && pod.Name == name {
			return w
		}
	}
	return nil
}

// logs answers kubectl logs. All runs of a container write into one file, without times.
func (s *server) logs(w http.ResponseWriter, r *http.Request) {
	worker, c, err := s.find(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	if c.image == nil {
		fmt.Fprintln(w, errNoProcess)
		return
	}
	query := r.URL.Query()
	for _, unknown := range []string{"sinceSeconds", "sinceTime", "timestamps", "previous"} {
		if query.Get(unknown) != "" {
			http.Error(w, "this kubelet keeps one log of all runs of a container, without times: leave out --since, --since-time, --timestamps and --previous", http.StatusBadRequest)
			return
		}
	}
	lines, most := -1, int64(-1)
	if text := query.Get("tailLines"); text != "" {
		if lines, err = strconv.Atoi(text); err != nil || lines < 0 {
			http.Error(w, fmt.Sprintf("tailLines is %q: use a number", text), http.StatusBadRequest)
			return
		}
	}
	if text := query.Get("limitBytes"); text != "" {
		if most, err = strconv.ParseInt(text, 10, 64); err != nil || most < 0 {
			http.Error(w, fmt.Sprintf("limitBytes is %q: use a number", text), http.StatusBadRequest)
			return
		}
	}
	file, err := os.Open(worker.logPath(c))
	if err != nil {
		http.Error(w, fmt.Sprintf("container %s has no log yet: %v", c.spec.Name, err), http.StatusBadRequest)
		return
	}
	defer file.Close()
	if err := toLastLines(file, lines); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	s.send(w, r, file, most, func() bool { return query.Get("follow") == "true" && !worker.hasEnded() })
}

// send copies the file, and what is added to it for as long as follows says so.
func (s *server) send(w http.ResponseWriter, r *http.Request, file io.Reader, most int64, follows func() bool) {
	if most >= 0 {
		file = io.LimitReader(file, most)
	}
	ticker := time.NewTicker(logPeriod)
	defer ticker.Stop()
	for {
		on := follows() // before the copy: what was written before the end is sent
		if _, err := io.Copy(w, file); err != nil || http.NewResponseController(w).Flush() != nil || !on {
			return // the client has gone, or has all
		}
		select {
		case <-r.Context().Done():
			return
		case <-ticker.C:
		}
	}
}

// toLastLines moves to the last lines of a file; a number below 0 moves to its beginning.
func toLastLines(file io.ReadSeeker, lines int) error {
	if lines < 0 {
		return nil
	}
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	from := max(0, size-logTail)
	if _, err := file.Seek(from, io.SeekStart); err != nil {
		return err
	}
	text, err := io.ReadAll(io.LimitReader(file, size-from))
	if err != nil {
		return err
	}
	_, err = file.Seek(size-int64(len(lastLines(text, lines))), io.SeekStart)
	return err
}

func lastLines(text []byte, n int) []byte {
	at := len(bytes.TrimSuffix(text, []byte("\n")))
	if n == 0 {
		return nil
	}
	for range n {
		if at = bytes.LastIndexByte(text[:at], '\n'); at < 0 {
			return text
		}
	}
	return text[at+1:]
}

// exec answers kubectl exec.
func (s *server) exec(w http.ResponseWriter, r *http.Request) {
	worker, c, err := s.find(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	streams, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	remotecommand.ServeExec(w, r, executor{worker, c}, worker.latest().Name, string(worker.uid), c.spec.Name, r.URL.Query()["command"], streams,
		streamIdle, streamBegin, remotecommand.SupportedStreamingProtocols)
}

// executor runs commands in one container.
type executor struct {
	w *worker
	c *container
}

// ExecInContainer runs a command until it ends. An end with another code than 0 is an error that has the code.
func (e executor) ExecInContainer(ctx context.Context, _, _, _ string, command []string, in io.Reader, out, errs io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	if e.c.image == nil {
		return errNoProcess
	}
	if len(command) == 0 {
		return errors.New("there is no command")
	}
	path, further, err := e.program(command[0])
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd, err := e.w.command(ctx, e.c, command[0], path, slices.Concat(afterFirst(command), further))
	if err != nil {
		return err
	}
	done := streamed(cmd, in, out, errs)
	if tty {
		if done, err = onTerminal(cmd, in, out, resize); err != nil {
			return err
		}
	}
	ended, err := launch(cmd)
	if err != nil {
		return errors.Join(err, done())
	}
	err = <-ended
	if closed := done(); err == nil {
		return closed
	}
	return utilexec.CodeExitError{Err: err, Code: int(exitCode(cmd, err))}
}

// program finds what the command is in the container: a program that the image names, its own, or one on its PATH. It may have further arguments.
func (e executor) program(name string) (path string, further []string, err error) {
	for at, program := range e.c.image.Exec {
		if at == name || filepath.Base(at) == name {
			return program.Path, program.Args, nil
		}
	}
	if filepath.Base(e.c.image.Path) == name {
		return e.c.image.Path, nil, nil
	}
	if strings.Contains(name, "/") {
		path, err = exec.LookPath(name)
		return path, nil, err
	}
	env, err := e.w.environment(e.c)
	if err != nil {
		return "", nil, err
	}
	for _, dir := range filepath.SplitList(env["PATH"]) {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil, nil
		}
	}
	return "", nil, fmt.Errorf("%s: executable file not found in the container's PATH %s", name, env["PATH"])
}

// streamed connects the command with the streams. The command's end does not wait for the user's input to end.
func streamed(cmd *exec.Cmd, in io.Reader, out, errs io.WriteCloser) (done func() error) {
	if out != nil {
		cmd.Stdout = out
	}
	if errs != nil {
		cmd.Stderr = errs
	}
	if in == nil {
		return func() error { return nil }
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return func() error { return err }
	}
	go func() {
		_, _ = io.Copy(stdin, in) // it ends with the command, or the user
		_ = stdin.Close()
	}()
	return func() error { return nil }
}

// onTerminal gives the command a terminal of its own. done closes it when the command has ended.
func onTerminal(cmd *exec.Cmd, in io.Reader, out io.Writer, resize <-chan remotecommand.TerminalSize) (done func() error, err error) {
	ours, theirs, err := pty.Open()
	if err != nil {
		return nil, fmt.Errorf("making a terminal: %w", err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs, theirs, theirs
	cmd.SysProcAttr.Setpgid, cmd.SysProcAttr.Setsid, cmd.SysProcAttr.Setctty = false, true, true
	go func() {
		for size := range resize {
			_ = pty.Setsize(ours, &pty.Winsize{Rows: size.Height, Cols: size.Width}) // it has ended
		}
	}()
	if in != nil {
		go func() { _, _ = io.Copy(ours, in) }() // it ends with the terminal, or the user
	}
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = io.Copy(out, ours) // EIO when no one has the other end any more
	}()
	return func() error {
		closed := theirs.Close()
		<-copied
		return errors.Join(closed, ours.Close())
	}, nil
}

// forward answers kubectl port-forward.
func (s *server) forward(w http.ResponseWriter, r *http.Request) {
	worker := s.k.pods.find(r.PathValue("namespace"), r.PathValue("pod"))
	if worker == nil {
		http.Error(w, fmt.Sprintf("pod %s/%s is not on node %s", r.PathValue("namespace"), r.PathValue("pod"), s.k.Node), http.StatusNotFound)
		return
	}
	ports, err := portforward.NewV4Options(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	portforward.ServePortForward(w, r, forwarder{worker}, worker.latest().Name, string(worker.uid), ports, streamIdle, streamBegin, portforward.SupportedProtocols)
}

// forwarder connects to the ports of one pod.
type forwarder struct{ w *worker }

// PortForward carries one connection until either side ends it.
func (f forwarder) PortForward(ctx context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	if !f.w.hasProcesses() {
		return errNoProcess
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(nodeAddress, strconv.Itoa(int(f.w.portOf(port)))))
	if err != nil {
		return fmt.Errorf("connecting to port %d of the pod: %w", port, err)
	}
	defer conn.Close()
	go func() {
		_, _ = io.Copy(conn, stream) // it ends with either
		if tcp, is := conn.(*net.TCPConn); is {
			_ = tcp.CloseWrite()
		}
	}()
	_, err = io.Copy(stream, conn)
	return err
}

// portOf is the port of this machine that stands for a port of the pod.
func (w *worker) portOf(port int32) int32 {
	for _, c := range w.containers {
		if c.image != nil && c.image.Ports[port] != 0 {
			return c.image.Ports[port]
		}
	}
	return port
}
