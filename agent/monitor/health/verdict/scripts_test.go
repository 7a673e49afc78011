package verdict_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/config"
)

func TestVerdicts(t *testing.T) {
	for _, row := range []struct{ name, script string }{
		{"an Xid that follows from another", `
			read 0
			xid 0 45
			+1s
			xid 0 45
			xids 0: 45x2
			xid 0 13
			+9s
			xid 0 45
			xids 0: 13x1 45x2
			+1s
			xid 0 45
			xids 0: 45x3 13x1`},
		{"an Xid of rows that the driver does not report", `
			read 0
			xid 0 63
			= 0 RowRemapPending/ResetGPU
			xid 0 64
			= 0 XidCritical/ContactSupport RowRemapFailed/ContactSupport RowRemapPending/ResetGPU critical
			# the state has taken over from the Xid, and no reset mends a failure
			+2s
			read 0
			+2s
			read 0
			= 0 RowRemapFailed/ContactSupport RowRemapPending/ResetGPU critical
			restart boot-1
			read 0
			= 0 RowRemapFailed/ContactSupport RowRemapPending/ResetGPU critical
			restart boot-2
			read 0
			= 0 RowRemapFailed/ContactSupport critical`},
		{"an Xid of rows that the driver reports", `
			read 0 row-ok row-fine
			xid 0 63
			= healthy
			event 0 retired
			event 0 retire-failed
			= healthy`},
		{"an Xid of rows of a GPU that has none", `
			read 0
			arch 0 7
			xid 0 63
			xid 0 64
			+2s
			read 0
			+2s
			read 0
			= 0 XidCritical/ContactSupport critical
			arch 0 0
			event 0 retired
			= 0 XidCritical/ContactSupport critical
			arch 0 8
			event 0 retired
			event 0 retire-failed
			= 0 XidCritical/ContactSupport RowRemapFailed/ContactSupport RowRemapPending/ResetGPU critical`},
		{"a row that cannot be replaced ends no other Xid", `
			read 0 row-failed
			xid 0 62
			+2s
			read 0 row-failed
			+2s
			read 0 row-failed
			= 0 XidCritical/ResetGPU RowRemapFailed/ContactSupport critical`},
		{"an architecture that is not known", `
			read 0
			arch 0 0
			xid 0 63
			= 0 RowRemapPending/ResetGPU`},
		{"an Xid that is critical from Ampere on alone", `
			read 0, 1
			arch 0 7
			xid 0 109
			xid 1 109
			= 1 XidCritical/ResetGPU critical
			restart boot-1
			read 0, 1
			xid 0 74
			= 1 XidCritical/ResetGPU critical`},

		// Errors of memory.
		{"a memory error of which nothing is left", `
			read 0
			event 0 ecc
			= 0 UncorrectableECC/ResetGPU
			toreset degraded:
			+29s
			read 0
			= 0 UncorrectableECC/ResetGPU
			+1s
			read 0
			= 0 UncorrectableECC/ResetGPU
			+2s
			read 0
			= healthy`},
		{"a memory error for which the driver recommends an action", `
			read 0
			event 0 poison
			+2s
			read 0 action=1
			= 0 ResetRequired/ResetGPU UncorrectableECC/ResetGPU critical
			+2s
			read 0 action=1
			= 0 ResetRequired/ResetGPU critical`},
		{"more memory errors than before", `
			read 0 errors=1
			= healthy
			+2s
			read 0 errors=2
			= 0 UncorrectableECC/ResetGPU`},
		{"memory errors, and the driver recommends no action", `
			read 0 no-action errors=1
			= 0 UncorrectableECC/ResetGPU
			+1h
			read 0 no-action errors=1
			= 0 UncorrectableECC/ResetGPU
			+2s
			read 0 no-action errors=0
			+2s
			read 0 no-action errors=0
			= healthy`},
		{"a memory error, and the driver does not count them", `
			read 0 no-action
			= healthy
			event 0 ecc
			+1h
			read 0 no-action
			+2s
			read 0 no-action
			= 0 UncorrectableECC/ResetGPU`},
		{"memory errors of an earlier boot, of a GPU for which no driver recommends an action", `
			read 0
			arch 0 7
			read 0 no-action errors=1
			= healthy`},

		// What ends what an Xid has left.
		{"a row that is replaced shows a reset", `
			read 0 row-pending
			xid 0 62
			= 0 XidCritical/ResetGPU RowRemapPending/ResetGPU critical
			+2s
			read 0 row-ok
			+2s
			read 0 row-ok
			= healthy`},
		{"a repair that is done shows a reset", `
			read 0 repair
			xid 0 62
			+2s
			read 0 repaired
			+2s
			read 0 repaired
			= healthy`},
		{"fewer errors show a reset", `
			read 0 errors=2
			xid 0 62
			+2s
			read 0 errors=1
			+2s
			read 0 errors=1
			= healthy`},
		{"fewer corrected errors show a reset", `
			read 0 corrected=2
			xid 0 62
			+2s
			read 0 corrected=1
			+2s
			read 0 corrected=1
			= healthy`},
		{"nothing shows a reset", `
			read 0 corrected=1 row-ok repaired
			xid 0 62
			+2s
			read 0 corrected=1 row-ok repaired
			+1h
			read 0 corrected=2 row-ok repaired
			+2s
			read 0
			+2s
			read 0 corrected=1 row-pending repair
			+2s
			read 0
			+2s
			read 0
			= 0 XidCritical/ResetGPU RowRemapPending/ResetGPU critical`},
		{"an action that is recommended takes over, and ends", `
			read 0
			xid 0 62
			+2s
			read 0 action=2
			+2s
			read 0 action=2
			= 0 RebootRequired/RebootNode critical
			+2s
			read 0
			+2s
			read 0
			= healthy`},
		{"an action that is over shows a reset", `
			read 0 action=1
			event 0 ecc
			+2s
			read 0
			+2s
			read 0
			= healthy`},
		{"an Xid that settles, if the driver recommends actions", `
			read 0, 1 no-action
			xid 0 109
			xid 1 109
			+27s
			read 0, 1 no-action
			+2s
			read 0, 1 no-action
			= 0 XidCritical/ResetGPU; 1 XidCritical/ResetGPU critical
			toreset critical:
			+1s
			read 0, 1 no-action
			toreset critical: 1
			+2s
			read 0, 1 no-action
			= 1 XidCritical/ResetGPU critical`},
		{"a GPU that comes back for the next process was reset", `
			read 0, 1, 2
			xid 0 62
			xid 1 62
			+2s
			read 0 lost, 2
			restart boot-1
			read 0, 1, 2
			+2s
			read 0, 1, 2
			= healthy`},
		{"a GPU that comes back was reset", `
			read 0, 1
			xid 0 62
			+2s
			read 0 lost, 1
			+2s
			read 0, 1
			+2s
			read 0, 1
			= healthy
			xid 0 62
			+2s
			read 1
			+2s
			read 0, 1
			+2s
			read 0, 1
			= healthy`},
		{"a driver that was loaded again", `
			read 0
			xid 0 62
			error nodriver
			read 0
			+2s
			read 0
			= healthy
			xid 0 62
			error replaced
			restart boot-1
			read 0
			+2s
			read 0
			= healthy
			xid 0 62
			error unresponsive
			read 0
			+2s
			read 0
			= 0 XidCritical/ResetGPU critical`},

		// What a reading says.
		{"recovery actions", `
			read 0, 1 action=1, 2 action=2, 3 action=3, 4 action=4, 5 action=5, 6 action=6, 7 action=7, 8 action=99
			= 2 RebootRequired/RebootNode; 7 RebootRequired/RebootMachine; 1 ResetRequired/ResetGPU; 6 ResetRequired/ResetBus; 8 ResetRequired/ContactSupport; ` +
			`3 DrainRequired/DrainAndReset; 4 DrainRequired/DrainAndReset; 5 DrainRequired/RecoverIMEX critical
			+30s
			read 0, 1 action=1, 2 action=2, 3 action=3, 4 action=4, 5 action=5, 6 action=6, 7 action=7, 8 action=99
			toreset critical: 1 4`},
		{"flags of a driver that recommends no action", `
			read 0 no-action, 1 no-action needs-reset, 2 no-action needs-drain needs-reset, 3 needs-reset
			= 1 ResetRequired/ResetGPU; 2 DrainRequired/DrainAndReset critical`},
		{"modes, pages and the fabric", `
			read 0 ecc-mode, 1 mig-mode, 2 pages, 3 fabric=3, 4 fabric-ill=3, 5 fabric-fails=3, 6 fabric-ill=2, 7 mig-on
			= 2 PageRetirementPending/ResetGPU; 0 ModePending/ResetGPU; 1 ModePending/ResetGPU; 4 FabricUnhealthy/CheckFabric; 5 FabricUnhealthy/CheckFabric`},
		{"a mode that the agent has asked for", `
			read 0 mig-mode
			mig 0
			+2s
			read 0 mig-mode
			+2s
			read 0 mig-mode
			= healthy
			restart boot-1
			read 0 mig-mode
			= healthy
			+2s
			read 0 mig-on
			+2s
			read 0 mig-mode
			= 0 ModePending/ResetGPU`},
		{"what nothing mends, and the driver reports no more", `
			read 0 sram unrepairable
			= 0 SRAMThresholdExceeded/ContactSupport MemoryUnrepairable/ContactSupport critical
			+2s
			read 0
			+2s
			read 0
			= 0 SRAMThresholdExceeded/ContactSupport MemoryUnrepairable/ContactSupport critical`},
		{"what only a thorough reading reports stays until the next", `
			read 0 repair fabric-ill=3
			+2s
			quick 0
			+2s
			quick 0
			= 0 RepairPending/ResetGPU FabricUnhealthy/CheckFabric
			+2s
			read 0
			+2s
			read 0
			= healthy`},
		{"nothing else is read of a GPU that is lost", `
			read 0 ecc-mode, 1
			+2s
			read 0 lost, 1
			+2s
			read 0 lost, 1
			= 0 GPULost/RebootNode critical`},
		{"a GPU that is lost has no name", `
			read 0, 1
			+2s
			read 0 lost nameless placeless, 1
			= 0 GPULost/RebootNode critical
			+2s
			read 0 nameless placeless index=1, 1
			= 0 GPULost/RebootNode GPUMissing/RebootNode critical`},
		{"a GPU that is lost has the number of another", `
			read 0, 1
			+2s
			read 1, 0 lost nameless placeless index=1
			= GPULost/RebootNode; 0 GPUMissing/RebootNode critical`},
		{"two readings that follow one another at once are one", `
			read 0 row-pending
			+2s
			read 0
			+500ms
			read 0 row-ok
			= 0 RowRemapPending/ResetGPU
			read 0 row-ok
			= 0 RowRemapPending/ResetGPU
			+1s
			read 0 row-ok
			= healthy`},
		{"one of two findings is over", `
			read 0 row-pending ecc-mode pages
			+2s
			read 0 row-pending
			= 0 RowRemapPending/ResetGPU PageRetirementPending/ResetGPU ModePending/ResetGPU`},
		{"an event is no reading", `
			read 0 ecc-mode
			+2s
			read 0
			+2s
			event 0 poison
			= 0 UncorrectableECC/ResetGPU ModePending/ResetGPU`},

		// Xids.
		{"the worst action of several Xids, and all of their instances", `
			read 0
			xid 0 62 gi=2
			xid 0 62 gi=1
			xid 0 109 gi=1
			= 0 XidCritical/ResetGPU[1 2] critical
			+30s
			read 0
			toreset critical: 0
			xid 0 79 gi=3
			= 0 XidCritical/RebootNode[1 2 3] critical
			xid 0 62
			= 0 XidCritical/RebootNode critical
			xids 0: 62x1 79x1 62x1 62x1 109x1
			relevant 0: 62x1 62x1 109x1 62x1 79x1`},
		{"an Xid that follows the kernel's log", `
			read 0
			logged 0 62
			logged 1 62
			= healthy
			xids 0: 62x1
			confirm 1 62
			confirm 0 62
			= 0 XidCritical/ResetGPU critical
			xids 0: 62x1
			confirm 0 95
			xids 0: 62x1 95x1`},
		{"Xids that matter for what is found", `
			read 0
			relevant 0:
			xid 0 13
			relevant 0:
			+1m
			xid 0 31
			xid 0 44
			xid 0 154
			read 0 ecc-mode
			relevant 0: 31x1
			xid 0 109
			relevant 0: 109x1
			+30s
			read 0
			relevant 0: 109x1`},
		{"errors of three pods in an hour", `
			read 0
			program 0 a
			program 0 b
			program 0 b
			+2s
			read 0
			= healthy
			program 0 c
			+2s
			read 0
			= 0 RepeatedXid/RunDiagnostics
			+59m56s
			read 0
			+2s
			read 0
			= healthy`},

		// The bus, and GPUs that are missing.
		{"the driver does not report a GPU", `
			bus 0 1 2/vfio-pci 3/nvidia
			read 0
			= 0000:02:00.0 GPUMissing/RebootNode; 0000:04:00.0 GPUMissing/RebootNode critical
			read 0, 1
			+2s
			read 0, 1
			= 0000:04:00.0 GPUMissing/RebootNode critical
			bus 0 1/vfio-pci
			read 0
			= 0000:04:00.0 GPUMissing/RebootNode critical
			ack
			= healthy`},
		{"the first GPU of the bus is lent to a virtual machine", `
			read 0, 1
			bus 0/vfio-pci 1
			+2s
			read 1
			= healthy`},
		{"a missing GPU that is on the bus cannot be acknowledged", `
			bus 0 1
			read 0, 1
			+2s
			read 0
			+2s
			ack
			= 1 GPUMissing/RebootNode critical
			bus 0
			read 0
			+2s
			ack
			= healthy`},
		{"a missing GPU of which the bus reports nothing cannot be acknowledged", `
			read 0, 1
			+2s
			read 0
			ack
			= 1 GPUMissing/RebootNode critical`},
		{"another GPU in the place of one", `
			read 0
			+2s
			read 0 uuid=7
			= healthy`},
		{"a GPU without a place is none of the bus", `
			bus 0 1
			read 0 placeless
			= healthy`},
		{"nothing is known of a GPU that has only erred", `
			read 0
			xid 5 62
			+2s
			read 0
			= 5 GPUMissing/RebootNode XidCritical/ResetGPU critical`},
		{"a GPU that an event has named answers", `
			read
			= no GPU
			xid 5 62
			read 5
			= 5 XidCritical/ResetGPU critical`},

		// A driver that does not answer.
		{"patience with a driver that is not loaded", `
			bus 0
			error nodriver
			= not known
			+3999ms
			= not known
			+1ms
			= unknown: DriverNotLoaded
			bus
			= no GPU
			read 0 ecc-mode
			error nodriver
			+4s
			= 0 ModePending/ResetGPU and not known now`},
		{"patience with a driver that fails", `
			error odd
			+3999ms
			= not known
			+1ms
			= unknown: HealthUnknown
			read 0 sram
			error odd
			+4s
			= 0 SRAMThresholdExceeded/ContactSupport and not known now critical`},
		{"patience with a driver that hangs", `
			read 0
			error unresponsive
			+3999ms
			= not known
			+1ms
			= unknown: DriverUnresponsive
			+55999ms
			= unknown: DriverUnresponsive
			+1ms
			= hangs/RebootNode critical
			read 0
			= healthy`},
		{"a driver that hangs when it is first asked", `
			error unresponsive
			+29999ms
			= not known
			+1ms
			= unknown: DriverUnresponsive`},
		{"a driver that hangs after an Xid by which drivers do", `
			read 0
			logged 0 119
			error unresponsive
			+1999ms
			= not known
			+1ms
			= hangs/RebootNode critical
			restart boot-1
			error unresponsive
			+9m57999ms
			= hangs/RebootNode critical`},
		{"a driver that hangs long after an Xid", `
			read 0
			logged 0 119
			+10m
			error unresponsive
			+4s
			= unknown: DriverUnresponsive`},
		{"a driver that hangs ten minutes after an Xid", `
			read 0
			logged 0 119
			+9m58s
			error unresponsive
			+1999ms
			= not known
			+1ms
			= not known`},
		{"a driver that hangs, and what was found is worse", `
			read 0 lost, 1
			error unresponsive
			+1m
			= 0 GPULost/RebootNode and not known now critical`},
		{"a driver that hangs, and what was found is less", `
			read 0
			xid 0 62
			error unresponsive
			+1m
			= 0 XidCritical/ResetGPU hangs/RebootNode critical`},
		{"a driver that hangs while the agent changes a GPU", `
			read 0
			change 0
			error unresponsive
			+59s
			= healthy
			+1s
			= hangs/RebootNode critical`},
		{"what looks wrong half a minute after a change", `
			read 0
			change 0
			change 0
			changed 0
			+1h
			read 0 lost
			= healthy
			changed 0
			+29999ms
			read 0 lost
			= healthy
			+1ms
			read 0 lost
			= 0 GPULost/RebootNode critical`},

		// What comes and goes.
		{"for the third time in an hour", `
			read 0 ecc-mode
			+2s
			read 0
			+2s
			read 0
			+2s
			read 0 ecc-mode
			+2s
			read 0
			+2s
			read 0
			= healthy
			+59m49999ms
			read 0 ecc-mode
			+2s
			read 0
			+9m57999ms
			read 0
			= 0 ModePending/ResetGPU
			+1ms
			read 0
			= healthy`},
		{"for the third time in seconds", `
			read 0 ecc-mode
			+2s
			read 0
			+2s
			read 0
			+2s
			read 0 ecc-mode
			+2s
			read 0
			+2s
			read 0
			+2s
			read 0 ecc-mode
			recovered 0: false
			+2s
			read 0
			+9m57999ms
			read 0
			= 0 ModePending/ResetGPU
			+1ms
			read 0
			= healthy
			recovered 0: false
			+4999ms
			recovered 0: true`},
		{"what has come and gone gives way to what is worse, and to what is as bad", `
			read 0 ecc-mode
			+2s
			read 0
			+2s
			read 0
			+2s
			read 0 ecc-mode
			+2s
			read 0
			+2s
			read 0
			+2s
			read 0 ecc-mode
			+2s
			read 0 pages
			+2s
			read 0 pages
			= 0 PageRetirementPending/ResetGPU
			+2s
			read 0 row-failed
			+2s
			read 0 row-failed
			= 0 RowRemapFailed/ContactSupport critical`},
		{"what has not recovered", `
			read 0, 1
			xid 5 13
			change 0
			change 1
			+1m
			recovered 0: true
			recovered 5: false
			read 0 lost
			= 5 GPUMissing/RebootNode critical
			recovered 0: false
			recovered 1: false`},
		{"for the third time in more than an hour", `
			read 0 ecc-mode
			+2s
			read 0
			+2s
			read 0
			+2s
			read 0 ecc-mode
			+2s
			read 0
			+2s
			read 0
			+59m50s
			read 0 ecc-mode
			+2s
			read 0
			+2s
			read 0
			= healthy`},

		// Resets by the agent.
		{"a reset is tried once", `
			read 0 action=1, 1 row-pending
			toreset critical:
			+29999ms
			read 0 action=1, 1 row-pending
			toreset degraded:
			+1ms
			read 0 action=1, 1 row-pending
			toreset never:
			toreset critical: 0
			toreset degraded: 0 1
			reset 0
			toreset critical: 0
			cancel 0
			cancel 0
			reset 0
			done 0
			toreset critical:
			restart boot-1
			toreset critical:
			read 0 action=1, 1 row-pending
			toreset critical:`},
		{"resets that are cancelled do not count", `
			read 0 action=1
			+30s
			read 0 action=1
			reset 0
			cancel 0
			reset 0
			cancel 0
			reset 0
			cancel 0
			reset 0
			reset 0
			toreset critical: 0`},
		{"a GPU that may be well again is not reset", `
			read 0 row-pending
			+30s
			read 0
			toreset degraded: 0
			+2s
			read 0 row-ok
			toreset degraded:`},
		{"three resets a day", `
			read 0 action=1
			reset 0
			+1s
			reset 0
			+1s
			reset 0
			+30s
			read 0 action=1
			toreset critical:
			+23h59m27999ms
			read 0 action=1
			toreset critical:
			+1ms
			read 0 action=1
			toreset critical: 0
			error odd
			toreset critical:`},
		{"a GPU that is gone is not reset", `
			bus 0 1
			read 0, 1
			+2s
			read 0 lost
			+1h
			read 0 lost
			toreset degraded:
			= 0 GPULost/RebootNode; 1 GPUMissing/RebootNode critical`},
		{"the settings' Xids", `
			read 0
			xid 0 13
			xid 0 62
			= 0 XidCritical/RunDiagnostics critical`},
	} {
		s := config.Health{}
		if row.name == "the settings' Xids" {
			s = config.Health{CriticalXids: []int{13}, ApplicationXids: []int{62}}
		}
		play(t, row.name, s, row.script)
	}
}
