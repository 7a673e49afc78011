package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// logLines is how much of a component's log an error shows.
const logLines = 15

// supervisor runs the components. The kernel kills them when the thread that started them ends, so one goroutine holds
// a thread for their whole life.
type supervisor struct {
	dir   string
	tasks chan func()
	over  sync.WaitGroup

	mu        sync.Mutex
	processes []*process
	ports     []int // descriptors that hold the ports
	failed    error // why the first component ended by itself
	stopping  bool
	died      chan struct{} // closed once failed is set
}

// process is a component that was started.
type process struct {
	component
	cmd *exec.Cmd
}

func newSupervisor(dir string) *supervisor {
	s := &supervisor{dir: dir, tasks: make(chan func()), died: make(chan struct{})}
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		for task := range s.tasks {
			task()
		}
	}()
	return s
}

// reservePort finds a free port on loopback and reserves it for the component that shares it.
func (s *supervisor) reservePort() (int, error) {
	port, err := s.bind()
	if err != nil {
		return 0, fmt.Errorf("reserving a port on 127.0.0.1: %w", err)
	}
	return port, nil
}

func (s *supervisor) bind() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	s.ports = append(s.ports, fd)
	s.mu.Unlock()
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return 0, err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, err
	}
	address, err := unix.Getsockname(fd)
	if err != nil {
		return 0, err
	}
	inet, ok := address.(*unix.SockaddrInet4)
	if !ok {
		return 0, fmt.Errorf("the socket has an address of type %T", address)
	}
	return inet.Port, nil
}

// passedOn are variables of Go's runtime (go doc runtime) that a user sets for all programs of a test run: how often
// they collect garbage, and on how many cores they run.
var passedOn = []string{"GOGC", "GOMAXPROCS"}

// start runs a component; its output goes to its log.
func (s *supervisor) start(c component) error {
	out, err := os.Create(s.logOf(c.name))
	if err != nil {
		return fmt.Errorf("starting %s: %w", c.name, err)
	}
	defer out.Close()
	cmd := exec.Command(c.path, c.args...)
	cmd.Dir = s.dir
	cmd.Env = []string{"HOME=" + s.dir} // variables of the user, such as ETCD_…, are settings too
	for _, name := range passedOn {
		if value, set := os.LookupEnv(name); set {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
	}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL,
		Setpgid:   true, // Ctrl-C is for the parent, which stops them
	}
	started := make(chan error)
	s.tasks <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		return fmt.Errorf("starting %s: %w", c.name, err)
	}
	p := &process{component: c, cmd: cmd}
	s.mu.Lock()
	s.processes = append(s.processes, p)
	s.mu.Unlock()
	s.over.Go(func() { s.ends(p, cmd.Wait()) })
	return nil
}

// ends notes the first component that ends without a request.
func (s *supervisor) ends(p *process, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping || s.failed != nil {
		return
	}
	if err == nil {
		err = errors.New("exit status 0")
	}
	s.failed = fmt.Errorf("%s ended by itself: %w%s", p.name, err, s.logEnd(p.name))
	close(s.died)
}

// wait returns nil when the context is done, or why a component ended before.
func (s *supervisor) wait(ctx context.Context) error {
	select {
	case <-s.died:
		return s.failed
	case <-ctx.Done():
		return nil
	}
}

// stop kills everything at once. A graceful stop would take the API server 10 s, or forever once etcd is gone; and
// nothing of theirs is kept.
func (s *supervisor) stop() error {
	s.mu.Lock()
	s.stopping = true
	var errs []error
	for _, p := range s.processes {
		if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			errs = append(errs, fmt.Errorf("killing %s: %w", p.name, err))
		}
	}
	for _, fd := range s.ports {
		errs = append(errs, unix.Close(fd))
	}
	errs = append(errs, s.failed)
	s.mu.Unlock()
	s.over.Wait()
	close(s.tasks)
	return errors.Join(errs...)
}

func (s *supervisor) logOf(name string) string { return filepath.Join(s.dir, name+".log") }

// logEnd is the end of a component's log, for an error.
func (s *supervisor) logEnd(name string) string {
	path := s.logOf(name)
	text, err := lastLines(path, logLines)
	if err != nil || text == "" {
		return fmt.Sprintf(" (its log %s is empty)", path)
	}
	return fmt.Sprintf("; the end of its log %s:\n%s", path, text)
}

func lastLines(path string, n int) (string, error) {
	const enough = 32 << 10
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	tail, err := io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-enough), enough))
	if err != nil {
		return "", err
	}
	lines := strings.Split(strings.TrimSpace(string(tail)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n"), nil
}
