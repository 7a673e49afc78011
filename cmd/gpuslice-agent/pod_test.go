package main

import (
	"os"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// An agent that refuses an argument of its pod does not start, one that refuses an argument of a probe is ended, and a variable that it does not
// read leaves it without what the pod mounts.
func TestTheAgentTakesTheArgumentsOfItsPod(t *testing.T) {
	text, err := os.ReadFile("../../deploy/base/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var set appsv1.DaemonSet
	if err := yaml.UnmarshalStrict(text, &set); err != nil {
		t.Fatal(err)
	}
	container := set.Spec.Template.Spec.Containers[0]
	for name, args := range commandsOf(t, container) {
		sub, rest, err := command().Find(args)
		if err == nil {
			err = sub.ParseFlags(rest)
		}
		if err != nil {
			t.Errorf("%s: gpuslice-agent %s: %v", name, strings.Join(args, " "), err)
		}
	}
	run, _, err := command().Find(container.Args)
	if err != nil {
		t.Fatal(err)
	}
	for _, env := range container.Env {
		if (env.ValueFrom != nil || strings.HasPrefix(env.Name, "GPUSLICE_")) && !strings.Contains(run.UsageString(), env.Name) {
			t.Errorf("the agent does not say that it reads %s from its environment:\n%s", env.Name, run.UsageString())
		}
	}
}

// commandsOf are the arguments by which the container starts the agent, and by which its probes do.
func commandsOf(t *testing.T, container corev1.Container) map[string][]string {
	t.Helper()
	commands := map[string][]string{"args": container.Args}
	for name, probe := range map[string]*corev1.Probe{"startup": container.StartupProbe, "liveness": container.LivenessProbe, "readiness": container.ReadinessProbe} {
		if probe == nil || probe.Exec == nil || len(probe.Exec.Command) < 2 || probe.Exec.Command[1] != "health" {
			t.Fatalf("the %s probe does not ask the agent whether it works: %v", name, probe)
		}
		commands[name+" probe"] = probe.Exec.Command[1:]
	}
	return commands
}
