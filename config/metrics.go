package config

// The comment of each metric says what it is, and its labels. go generate makes of it the table of agent/METRICS.md, and config/glossary, which has
// the help text for Prometheus.

// Metrics of the desired config, and of the node's progress towards it.
const (
	// MetricPartitionReady is 1 if the condition ConditionGPUPartitionReady is True.
	//
	// Labels: reason
	MetricPartitionReady = "gpuslice_partition_ready"
	// MetricConverged is 1 if hardware and capacity are as the labels request, and nothing is left to do.
	MetricConverged = "gpuslice_converged"
	// MetricRequestInfo is 1 for the labels' request; the fingerprint is of the config that the name means on this node.
	//
	// Labels: label, name, fingerprint
	MetricRequestInfo = "gpuslice_request_info"
	// MetricPhaseInfo is 1 for the agent's current phase.
	//
	// Labels: phase
	MetricPhaseInfo = "gpuslice_phase_info"
	// MetricPhaseSeconds is the time in each phase since the agent started.
	//
	// Labels: phase
	MetricPhaseSeconds = "gpuslice_phase_seconds_total"
	// MetricBlockedSeconds is how long changes were blocked, for example by a window, a slot or a disruption budget, or for good.
	//
	// Labels: reason
	MetricBlockedSeconds = "gpuslice_blocked_seconds_total"
	// MetricBlocks is how often a change was blocked; with MetricBlockedSeconds it gives the mean wait, for example for a slot.
	//
	// Labels: reason
	MetricBlocks = "gpuslice_blocks_total"
	// MetricNodeFenced is 1 while a change keeps new pods off the node, by the agent's taint or a cordon.
	MetricNodeFenced = "gpuslice_node_fenced"
	// MetricSteps is the number of steps by their result: `done`, `waiting`, `failed`.
	//
	// Labels: kind, result
	MetricSteps = "gpuslice_steps_total"
	// MetricEvictions is the number of pods that had to leave: `evicted`, or `deleted` after their deadline; `overdue` ones stayed.
	//
	// Labels: result
	MetricEvictions = "gpuslice_evictions_total"
	// MetricRecoveries is how often an agent has taken over: an `interrupted` change, `leftovers` without a journal, a `strange_journal`.
	//
	// Labels: cause
	MetricRecoveries = "gpuslice_recoveries_total"
)

// Metrics of the GPUs' geometry, and of the advertised capacity.
const (
	// MetricInstances is the number of existing GPU instances.
	//
	// Labels: gpu, profile
	MetricInstances = "gpuslice_instances"
	// MetricInstanceInfo is 1 for each MIG device: DCGM's exporter knows it by GPU and `gpu_instance_id`, kubelet by the resource.
	//
	// Labels: gpu, device, gpu_instance_id, profile, resource
	MetricInstanceInfo = "gpuslice_instance_info"
	// MetricCapacityExpected is how many devices of a resource the GPUs have in their present geometry and sharing.
	//
	// Labels: resource
	MetricCapacityExpected = "gpuslice_capacity_expected"
	// MetricCapacityKubelet is how many devices of a resource kubelet can allocate, as it says on the node. Where NVIDIA's DRA driver advertises the
	// GPUs, it is the number in its ResourceSlices.
	//
	// Labels: resource
	MetricCapacityKubelet = "gpuslice_capacity_kubelet"
	// MetricCapacityAllocatable is how many devices of a resource the node object's allocatable has, for the scheduler. Where NVIDIA's DRA driver
	// advertises the GPUs, the scheduler uses its ResourceSlices, and it is the number in these.
	//
	// Labels: resource
	MetricCapacityAllocatable = "gpuslice_capacity_allocatable"
	// MetricPossibleDevices is how many devices of a resource the node could offer without a pod leaving: those that pods have, and as many as fit beside
	// what pods have. Each resource is counted as if the others got nothing. The names of resources are those of `kube-state-metrics`, as
	// `nvidia_com_mig_3g_40gb`. It is left out while the agent does not know what pods have.
	//
	// Labels: resource
	MetricPossibleDevices = "gpuslice_possible_devices"
	// MetricGPUFragmentation is the share of a GPU's free memory slices, those that no pod has, that the largest profile which fits there leaves over: 0 if
	// one instance can have them all. It is left out like `gpuslice_possible_devices`.
	//
	// Labels: gpu
	MetricGPUFragmentation = "gpuslice_gpu_fragmentation"
	// MetricGPUShare is the division of a GPU into parts that are 1 together: `used` is what pods have, `idle` is what the largest instance that fits beside
	// that could have, and `lost` is the rest. `gpuslice_gpu_fragmentation` says how much of the free slices is lost; slices that no instance can have are,
	// too. A GPU that no pod has is idle, also while it is cut, and one that has fallen off the bus is lost. It is left out like `gpuslice_possible_devices`.
	//
	// Labels: gpu, model, state
	MetricGPUShare = "gpuslice_gpu_share"
	// MetricPodGPUShare is the part of a GPU that a pod has: 1 for a whole GPU, and for an instance its memory slices of those of the GPU. A replica of
	// time-slicing or MPS is its part of what is shared, and pods that have one device together, as by one claim, have equal parts of it. It is left out
	// like `gpuslice_possible_devices`.
	//
	// Labels: namespace, pod, gpu, model, device, resource
	MetricPodGPUShare = "gpuslice_pod_gpu_share"
)

// Metrics of maintenance windows.
const (
	// MetricWindowOpen is 1 if the node may be disturbed now.
	MetricWindowOpen = "gpuslice_window_open"
	// MetricNextWindow is when the waiting change begins; if none waits, when the next window opens.
	MetricNextWindow = "gpuslice_next_window_start_timestamp_seconds"
	// MetricWindowOverrun is how long a change has run past its window.
	MetricWindowOverrun = "gpuslice_window_overrun_seconds"
)

// Metrics of the agent itself.
const (
	// MetricLastPass is when the agent last ended a pass; an old time means that the agent hangs.
	MetricLastPass = "gpuslice_last_pass_timestamp_seconds" //nolint:gosec // the name of a pass, no password
	// MetricLastSuccessfulPass is when a pass last ended without a failure.
	MetricLastSuccessfulPass = "gpuslice_last_successful_pass_timestamp_seconds" //nolint:gosec // the same
	// MetricAPIRequests is the number of requests to the API server by HTTP verb and class of the answer: `2xx`, `4xx`, `none`. Requests that the
	// agent holds back while the API server fails count as `none`, too.
	//
	// Labels: verb, code
	MetricAPIRequests = "gpuslice_api_requests_total"
	// MetricAdmissionPolicy is 1 if the policy for `nodes`, `evictions`, `leases` or `events` worked when the agent last tried what it forbids;
	// where a component has given the agent the right, also that for `configmaps` or `devicetaintrules`. Where the settings say
	// `podAccess: rbac`, that for `evictions` is left out if it is missing.
	//
	// Labels: policy
	MetricAdmissionPolicy = "gpuslice_admission_policy"
	// MetricPodAccess is 1 for what confines the agent to the pods of its node: `impersonation` of the node, the `policy` for evictions, or `rbac`
	// alone.
	//
	// Labels: level
	MetricPodAccess = "gpuslice_pod_access"
)

// Metrics of the memory of GPUs.
const (
	// MetricGPUMemoryTotal is the memory of a GPU, or of one of its instances; `device` is the UUID of the GPU, or of the instance's
	// first MIG device.
	//
	// Labels: gpu, device
	MetricGPUMemoryTotal = "gpuslice_gpu_memory_total_bytes"
	// MetricGPUMemoryUsed is the memory in use on a GPU, or on one of its instances.
	//
	// Labels: gpu, device
	MetricGPUMemoryUsed = "gpuslice_gpu_memory_used_bytes"
	// MetricGPUMemoryPressure is 1 if a GPU or an instance that several pods share is nearly full.
	//
	// Labels: gpu, device
	MetricGPUMemoryPressure = "gpuslice_gpu_memory_pressure"
	// MetricPodGPUMemoryUsed is the memory that the processes of a pod use on a GPU, or on one of its instances.
	//
	// Labels: namespace, pod, gpu, device
	MetricPodGPUMemoryUsed = "gpuslice_pod_gpu_memory_used_bytes"
)

// Metrics of how busy GPUs are, over the last five minutes. Values that NVML does not report are left out.
const (
	// MetricGPUBusy is the part of the time that processes kept a GPU or an instance busy, from 0 to 1. Of an instance it is the busy part of its
	// multiprocessors if that is more.
	//
	// Labels: gpu, device
	MetricGPUBusy = "gpuslice_gpu_busy_ratio"
	// MetricPodGPUBusy is the part of the time that a pod's processes kept a GPU or one of its instances busy, from 0 to 1.
	//
	// Labels: namespace, pod, gpu, device
	MetricPodGPUBusy = "gpuslice_pod_gpu_busy_ratio"
	// MetricPodGPUIdle is 1 if a pod has had a GPU or instance for `idle.after`, and has used it for less than `idle.below` per cent of that time; 0
	// if for more.
	//
	// Labels: namespace, pod, gpu, device
	MetricPodGPUIdle = "gpuslice_pod_gpu_idle"
)

// Metrics of the health of GPUs; `gpu` is the UUID.
const (
	// MetricGPUHealthy is 1 if nothing is wrong with a GPU, 0 if the condition ConditionGPUUnhealthy names it.
	//
	// Labels: gpu
	MetricGPUHealthy = "gpuslice_gpu_healthy"
	// MetricGPUProblem is 1 for each present problem of a GPU.
	//
	// Labels: gpu, reason, severity
	MetricGPUProblem = "gpuslice_gpu_problem"
	// MetricGPURecoveryAction is the driver's recommendation for a GPU, by NVML's number: 0 nothing, 1 reset, 2 reboot, 4 drain and
	// reset.
	//
	// Labels: gpu
	MetricGPURecoveryAction = "gpuslice_gpu_recovery_action"
	// MetricGPUXidEvents is the number of errors that the driver has reported since the agent started; unknown numbers count as `other`.
	//
	// Labels: gpu, xid, class
	MetricGPUXidEvents = "gpuslice_gpu_xid_events_total"
	// MetricGPUECCErrors is the number of memory errors since the last reset of a GPU (`volatile`) or ever (`aggregate`).
	//
	// Labels: gpu, type, counter
	MetricGPUECCErrors = "gpuslice_gpu_ecc_errors"
	// MetricGPURemappedRows is the number of replaced rows of memory, by the kind of error that was the cause.
	//
	// Labels: gpu, cause
	MetricGPURemappedRows = "gpuslice_gpu_remapped_rows"
	// MetricGPURowRemapPending is 1 if a row of memory is replaced at the next reset.
	//
	// Labels: gpu
	MetricGPURowRemapPending = "gpuslice_gpu_row_remap_pending"
	// MetricGPURowRemapFailed is 1 if a row of memory could not be replaced.
	//
	// Labels: gpu
	MetricGPURowRemapFailed = "gpuslice_gpu_row_remap_failed"
	// MetricGPURemapBanks is the number of banks of memory by how many spare rows they have left.
	//
	// Labels: gpu, spare
	MetricGPURemapBanks = "gpuslice_gpu_remap_banks"
	// MetricHealthEventsWatched is 1 if the driver delivers its events.
	MetricHealthEventsWatched = "gpuslice_health_events_watched"
	// MetricHealthKernelLogRead is 1 if the agent reads the kernel's log for errors of GPUs.
	MetricHealthKernelLogRead = "gpuslice_health_kernel_log_read"
	// MetricHealthReadSeconds is how long the last poll of the health of all GPUs took.
	MetricHealthReadSeconds = "gpuslice_health_read_seconds"
	// MetricHealthLastSuccess is when the driver last reported the GPUs' health.
	MetricHealthLastSuccess = "gpuslice_health_last_success_timestamp_seconds"
	// MetricNVMLErrors is the number of failed polls of GPU health, by the library's code.
	//
	// Labels: code
	MetricNVMLErrors = "gpuslice_nvml_errors_total"
)
