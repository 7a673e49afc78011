package node_test

import (
	"context"
	"maps"
	"slices"

	"github.com/gpuslice/gpuslice/test/gpusim/pods"
	"github.com/gpuslice/gpuslice/test/systemd"
	"github.com/gpuslice/gpuslice/test/systemd/systemdtest"
)

// services are of a host with GPUs, by how they come to run. All keep every GPU open while they do. What someone has stopped
// must not be started.
var services = map[string]systemd.Unit{
	"nvidia-dcgm.service":         {},
	"nvidia-persistenced.service": {UnitFileState: "static"},
	"nvsm.service":                {UnitFileState: "disabled"},
	"dcgm-exporter.service":       {UnitFileState: "disabled", ActiveState: "inactive"},
}

// firstUnitPID is above what Linux gives to real processes, and below the pids of simulated pods.
const firstUnitPID = 4_900_000

// machine is the host below a rig: its system bus, with services.
type machine struct {
	*systemd.Host
	rig *rig
}

// onMachine gives the node a host.
func (r *rig) onMachine() *machine {
	r.t.Helper()
	m := &machine{rig: r}
	m.Host = systemdtest.Start(r.t, systemd.Options{Units: services, OnUnit: m.unit})
	r.agents.bus = m.Address()
	for name := range services {
		if m.Unit(name).ActiveState == "active" {
			m.unit(name, true)
		}
	}
	return m
}

// unit has a service's process open every GPU, or end.
func (m *machine) unit(name string, runs bool) {
	pid := firstUnitPID + slices.Index(slices.Sorted(maps.Keys(services)), name)
	doing, err := "starting", error(nil)
	if runs {
		err = m.rig.Users.StartMonitor(pods.Process{PID: pid, Command: name, Cgroup: pods.OfUnit(name)}, m.rig.GPUs.UUIDs()...)
	} else {
		doing, err = "stopping", m.rig.Users.End(pid)
	}
	if err != nil {
		m.rig.t.Errorf("%s %s: %v", doing, name, err)
	}
}

// down is closed when the host goes down the next time.
func (m *machine) down(ctx context.Context) <-chan struct{} {
	before, down := m.Reboots(), make(chan struct{})
	go func() {
		if m.Wait(ctx, func() bool { return m.Reboots() > before }) == nil {
			close(down)
		}
	}()
	return down
}

// boot brings the host up again, under an agent that has ended. Nothing has survived; services run that are enabled, or
// that another one wants.
func (m *machine) boot() {
	m.rig.t.Helper()
	if err := m.rig.Reboot(m.rig.t.Context()); err != nil {
		m.rig.t.Fatal(err)
	}
	for name, u := range services {
		u.ActiveState = "active"
		if u.UnitFileState == "disabled" {
			u.ActiveState = "inactive"
		}
		m.SetUnit(name, u)
		if u.ActiveState == "active" {
			m.unit(name, true)
		}
	}
	m.Boot()
}

// asBefore fails the test if a service does not run that ran at first, or runs that did not.
func (m *machine) asBefore() {
	m.rig.t.Helper()
	for name, before := range services {
		want := "active"
		if before.ActiveState != "" {
			want = before.ActiveState
		}
		if got := m.Unit(name).ActiveState; got != want {
			m.rig.t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
}

// jobs are the services that someone has asked to be stopped, or to be started, in order.
func (m *machine) jobs(method string) []string {
	var out []string
	for _, call := range m.Calls() {
		if call.Method != method {
			continue
		}
		if name, ok := call.Args[0].(string); ok {
			out = append(out, name)
		}
	}
	return out
}
