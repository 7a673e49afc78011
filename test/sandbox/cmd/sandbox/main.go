// Command sandbox runs a program in its own mount namespace, with files shown at other paths.
package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/test/sandbox"
)

// The kernel kills this process by a signal when its parent dies. Only the main thread keeps that signal, and the thread that calls exec becomes
// the program. So the main goroutine stays on the main thread: from another one, the program would outlive the parent.
func init() { runtime.LockOSThread() }

func main() {
	var binds, tmpfs []string
	var argv0 string
	command := &cobra.Command{
		Use:   "sandbox [--tmpfs dir]... [--bind source=target]... [--argv0 name] -- program [argument]...",
		Short: "Run a program in a mount namespace of its own",
		Example: `  sandbox --bind=$PWD/modules=/proc/modules -- cat /proc/modules
  sandbox --tmpfs=/var/lib/kubelet -- ls /var/lib/kubelet`,
		Args:          cobra.MinimumNArgs(1),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			o := sandbox.Options{Tmpfs: tmpfs, Argv0: argv0}
			for _, text := range binds {
				m, err := sandbox.ParseMount(text)
				if err != nil {
					return err
				}
				o.Mounts = append(o.Mounts, m)
			}
			return become(cmd, o, args)
		},
	}
	command.Flags().StringArrayVar(&binds, "bind", nil, "show the file or directory `source=target` at target")
	command.Flags().StringArrayVar(&tmpfs, "tmpfs", nil, "make `dir` an empty directory")
	command.Flags().StringVar(&argv0, "argv0", "", "have the program think that its name is `name`")
	command.Flags().SetInterspersed(false)

	err := command.Execute()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	case err != nil:
		fmt.Fprintf(os.Stderr, "sandbox: %v\n", err)
		os.Exit(125)
	}
}

// become enters the sandbox and replaces this process by the program. A user without the right to mount gets a child
// process instead, since a running Go program cannot enter a user namespace.
func become(cmd *cobra.Command, o sandbox.Options, args []string) error {
	if !sandbox.Privileged() {
		if err := sandbox.Possible(); err != nil {
			return err
		}
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("looking for the sandbox's own file: %w", err)
		}
		child := sandbox.Command(cmd.Context(), self, o, args[0], args[1:]...)
		child.Stdin, child.Stdout, child.Stderr = os.Stdin, os.Stdout, os.Stderr
		child.SysProcAttr.Pdeathsig = syscall.SIGKILL
		return child.Run()
	}
	program, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	if err := sandbox.Enter(o); err != nil {
		return err
	}
	args[0] = cmp.Or(o.Argv0, args[0])
	if err := syscall.Exec(program, args, os.Environ()); err != nil {
		return fmt.Errorf("running %s: %w", program, err)
	}
	return nil
}
