package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"

	"k8s.io/apimachinery/pkg/labels"
	strict "sigs.k8s.io/json"

	"github.com/gpuslice/gpuslice/config/document"
)

// inputs is a settings file laid over the defaults, not yet checked. Values are as the user wrote them, so that a message
// can quote them.
type inputs struct {
	APIVersion     scalar               `json:"apiVersion"`
	Kind           scalar               `json:"kind"`
	NodeHeartbeat  scalar               `json:"nodeHeartbeat"`
	MIGStrategy    scalar               `json:"migStrategy"`
	MIGConfigMap   configMapInputs      `json:"migConfigMap"`
	Profiles       configMapInputs      `json:"profiles"`
	Maintenance    configMapInputs      `json:"maintenance"`
	DevicePlugin   devicePluginInputs   `json:"devicePlugin"`
	MPS            mpsInputs            `json:"mps"`
	MemoryPressure memoryPressureInputs `json:"memoryPressure"`
	Health         healthInputs         `json:"health"`
	Idle           idleInputs           `json:"idle"`
	StaleResources scalar               `json:"staleResources"`
	PodAccess      scalar               `json:"podAccess"`
	Reboot         rebootInputs         `json:"reboot"`
	Drain          drainInputs          `json:"drain"`
	Operands       list                 `json:"operands"`
	Units          list                 `json:"units"`
	Recover        recoverInputs        `json:"recover"`
	Timeouts       timeoutInputs        `json:"timeouts"`
	Retry          retryInputs          `json:"retry"`
	StartupTaint   scalar               `json:"startupTaint"`
}

type configMapInputs struct {
	Namespace scalar `json:"namespace"`
	Name      scalar `json:"name"`
	Key       scalar `json:"key"`
}

type configMapNameInputs struct {
	Namespace scalar `json:"namespace"`
	Name      scalar `json:"name"`
}

type devicePluginInputs struct {
	PodSelector   list                `json:"podSelector"`
	Namespaces    list                `json:"namespaces"`
	Containers    list                `json:"containers"`
	Handover      scalar              `json:"handover"`
	ConfigFile    scalar              `json:"configFile"`
	ConfigMap     configMapNameInputs `json:"configMap"`
	DefaultConfig scalar              `json:"defaultConfig"`
}

type mpsInputs struct {
	PodSelector list `json:"podSelector"`
	Containers  list `json:"containers"`
}

type memoryPressureInputs struct {
	Threshold scalar `json:"threshold"`
	Clear     scalar `json:"clear"`
	For       scalar `json:"for"`
}

type healthInputs struct {
	CriticalXids    list   `json:"criticalXids"`
	ApplicationXids list   `json:"applicationXids"`
	KernelLog       scalar `json:"kernelLog"`

	Taint scalar `json:"taint"`
	Reset scalar `json:"reset"`
}

type idleInputs struct {
	Every     scalar `json:"every"`
	After     scalar `json:"after"`
	Below     scalar `json:"below"`
	Instances scalar `json:"instances"`
}

type rebootInputs struct {
	Policy   scalar `json:"policy"`
	Sentinel scalar `json:"sentinel"`
}

type drainInputs struct {
	Mode          scalar            `json:"mode"`
	GradualFor    scalar            `json:"gradualFor"`
	AfterDeadline scalar            `json:"afterDeadline"`
	DeleteGrace   scalar            `json:"deleteGrace"`
	UnmanagedPods scalar            `json:"unmanagedPods"`
	EmptyDir      scalar            `json:"emptyDir"`
	OnUncordon    scalar            `json:"onUncordon"`
	Rules         []drainRuleInputs `json:"rules"` // without defaults, which the first rules of a file would be laid over
	Clients       list              `json:"clients"`
}

type drainOverrideInputs struct {
	Mode          scalar            `json:"mode"`
	GradualFor    scalar            `json:"gradualFor"`
	Deadline      scalar            `json:"deadline"`
	AfterDeadline scalar            `json:"afterDeadline"`
	DeleteGrace   scalar            `json:"deleteGrace"`
	UnmanagedPods scalar            `json:"unmanagedPods"`
	EmptyDir      scalar            `json:"emptyDir"`
	OnUncordon    scalar            `json:"onUncordon"`
	Rules         []drainRuleInputs `json:"rules"`
}

type drainRuleInputs struct {
	Namespaces list   `json:"namespaces"`
	Selector   scalar `json:"selector"`
	Action     scalar `json:"action"`
	For        scalar `json:"for"`
}

type recoverInputs struct {
	Adopt list `json:"adopt"`
}

type timeoutInputs struct {
	DriverCall scalar `json:"driverCall"`
	APICall    scalar `json:"apiCall"`
	Capacity   scalar `json:"capacity"`
	Drain      scalar `json:"drain"`
	Unit       scalar `json:"unit"`
	Reboot     scalar `json:"reboot"`

	DriverUpgrade scalar `json:"driverUpgrade"`
}

type retryInputs struct {
	Failures scalar `json:"failures"`
	First    scalar `json:"first"`
	Longest  scalar `json:"longest"`
	NoEffect scalar `json:"noEffect"`
}

// scalar is one value as it is written: text without its quotes, anything else as JSON.
type scalar string

// UnmarshalJSON accepts every value: the checks refuse those that are not allowed. A field without a value is as if it were not there.
func (s *scalar) UnmarshalJSON(raw []byte) error {
	var text string
	switch {
	case string(raw) == "null":
	case json.Unmarshal(raw, &text) == nil:
		*s = scalar(text)
	default:
		*s = scalar(raw)
	}
	return nil
}

// list is a list of values as they are written. A list in a file replaces the default's, also when it is empty.
type list []scalar

// UnmarshalJSON leaves a field without a value as if it were not there.
func (l *list) UnmarshalJSON(raw []byte) error {
	if string(raw) == "null" {
		return nil
	}
	elements := []scalar{} // anew: decoding reuses what is there, and an element without a value would be the default's
	if err := json.Unmarshal(raw, &elements); err != nil {
		return err //nolint:wrapcheck // the decoder around it adds the field
	}
	*l = elements
	return nil
}

func listOf(values []string) list {
	var out list
	for _, v := range values {
		out = append(out, scalar(v))
	}
	return out
}

// inputsOf writes settings in the form of a file, which decode then lays a user's file over. It leaves apiVersion and kind to that file.
func inputsOf(s Settings) inputs {
	in := inputs{
		NodeHeartbeat: scalar(s.NodeHeartbeat.String()),
		MIGStrategy:   scalar(s.MIGStrategy),
		MIGConfigMap:  inputsOfKey(s.MIGConfigMap),
		Profiles:      inputsOfKey(s.Profiles),
		Maintenance:   inputsOfKey(s.Maintenance),
		Reboot:        rebootInputs{Policy: scalar(s.Reboot.Policy), Sentinel: scalar(s.Reboot.Sentinel)},
		Drain: drainInputs{
			Mode: scalar(s.Drain.Mode), GradualFor: scalar(s.Drain.GradualFor.String()),
			AfterDeadline: scalar(s.Drain.AfterDeadline), DeleteGrace: scalar(s.Drain.DeleteGrace.String()),
			UnmanagedPods: scalar(s.Drain.UnmanagedPods), EmptyDir: scalar(s.Drain.EmptyDir), OnUncordon: scalar(s.Drain.OnUncordon),
		},
		DevicePlugin: devicePluginInputs{
			PodSelector: selectorTexts(s.DevicePlugin.PodSelector), Containers: listOf(s.DevicePlugin.Containers),
			Namespaces: listOf(s.DevicePlugin.Namespaces),
			Handover:   scalar(s.DevicePlugin.Handover), ConfigFile: scalar(s.DevicePlugin.ConfigFile),
			ConfigMap: configMapNameInputs{
				Namespace: scalar(s.DevicePlugin.ConfigMap.Namespace), Name: scalar(s.DevicePlugin.ConfigMap.Name),
			},
			DefaultConfig: scalar(s.DevicePlugin.DefaultConfig),
		},
		MPS: mpsInputs{PodSelector: selectorTexts(s.MPS.PodSelector), Containers: listOf(s.MPS.Containers)},
		MemoryPressure: memoryPressureInputs{
			Threshold: scalar(strconv.Itoa(s.MemoryPressure.Threshold)), Clear: scalar(strconv.Itoa(s.MemoryPressure.Clear)),
			For: scalar(s.MemoryPressure.For.String()),
		},
		Health: healthInputs{KernelLog: scalar(s.Health.KernelLog), Taint: scalar(s.Health.Taint), Reset: scalar(s.Health.Reset)},
		Idle: idleInputs{
			Every: scalar(s.Idle.Every.String()), After: scalar(s.Idle.After.String()), Below: scalar(strconv.Itoa(s.Idle.Below)),
			Instances: scalar(s.Idle.Instances),
		},
		StaleResources: scalar(s.StaleResources),
		PodAccess:      scalar(s.PodAccess),
		Operands:       listOf(s.Operands),
		Units:          listOf(s.Units),
		Timeouts: timeoutInputs{
			DriverCall: scalar(s.Timeouts.DriverCall.String()), APICall: scalar(s.Timeouts.APICall.String()),
			Capacity: scalar(s.Timeouts.Capacity.String()), Drain: scalar(s.Timeouts.Drain.String()),
			Unit: scalar(s.Timeouts.Unit.String()), Reboot: scalar(s.Timeouts.Reboot.String()),
			DriverUpgrade: scalar(s.Timeouts.DriverUpgrade.String()),
		},
		Retry: retryInputs{
			Failures: scalar(strconv.Itoa(s.Retry.Failures)), First: scalar(s.Retry.First.String()),
			Longest: scalar(s.Retry.Longest.String()), NoEffect: scalar(strconv.Itoa(s.Retry.NoEffect)),
		},
		StartupTaint: scalar(s.StartupTaint),
	}
	return in
}

func selectorTexts(selectors []labels.Selector) list {
	var out list
	for _, s := range selectors {
		out = append(out, scalar(s.String()))
	}
	return out
}

func inputsOfKey(k ConfigMapKey) configMapInputs {
	return configMapInputs{Namespace: scalar(k.Namespace), Name: scalar(k.Name), Key: scalar(k.Key)}
}

// decode lays a settings file over the inputs. It returns fields that do not exist as unknown and reads the rest, so that one error can
// have all mistakes.
func (in *inputs) decode(text []byte) (unknown, err error) {
	doc, err := document.JSON(text)
	if err != nil {
		return nil, fmt.Errorf("reading YAML: %w", err)
	}
	fields, err := strict.UnmarshalStrict(doc, in)
	if mismatch, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		form := "mapping"
		if mismatch.Type.Kind() == reflect.Slice {
			form = "list"
		}
		return nil, &InvalidError{Field: mismatch.Field, Want: fmt.Sprintf("must be a %s, not a %s", form, mismatch.Value)}
	}
	if err != nil {
		return nil, fmt.Errorf("reading fields: %w", err)
	}
	return errors.Join(fields...), nil
}
