package decide

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
)

// ModeField is the field of the settings that lets pods end by themselves if no rule matches them.
const ModeField = "drain.mode"

// AskField is the field of the settings that says how long a pod may take that is asked behind the cordon.
const AskField = "drain.gradualFor"

// From returns the policy of the settings for pods that have to leave the node.
func From(s config.Settings) drain.Policy {
	p := drain.Policy{
		Unmanaged:   choice(s.Drain.UnmanagedPods, config.FieldUnmanagedPods, config.FlagForceUnmanaged),
		EmptyDir:    choice(s.Drain.EmptyDir, config.FieldEmptyDir, config.FlagDeleteEmptyDirData),
		Deadline:    s.Timeouts.Drain,
		Delete:      s.Drain.AfterDeadline == config.AfterDeadlineDelete,
		DeleteGrace: s.Drain.DeleteGrace,
		Fence:       state.FenceTaint(),
		AskFor:      s.Drain.GradualFor,
		AskField:    AskField,
		Daemons:     sets.List(sets.New(s.DevicePlugin.Namespaces...).Insert(metav1.NamespaceSystem)),
	}
	if s.Drain.Mode == config.DrainGradual {
		p.EndFor, p.EndField = s.Drain.GradualFor, ModeField
	}
	for i, rule := range s.Drain.Rules {
		p.Rules = append(p.Rules, drain.Rule{
			Field: fmt.Sprintf("drain.rules[%d]", i), Namespaces: rule.Namespaces, Selector: rule.Selector,
			Action: drain.Action(rule.Action), For: rule.For,
		})
	}
	return p
}

func choice(action config.DrainAction, field, flag string) drain.Choice {
	return drain.Choice{Refuse: action == config.DrainRefuse, Field: "drain." + field, Flag: "--" + flag}
}
