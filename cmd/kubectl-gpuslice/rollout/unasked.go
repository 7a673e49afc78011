package rollout

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
)

// unasked has what the nodes show a user who may not ask the agents: the GPUs of the last report, before the change and after it. That is planned by the
// agent's own rules, for a config that each node knows by the hardware or by its name. Whether the change would begin, and who would leave, is not known.
func (p *plans) unasked(nodes []corev1.Node) {
	p.Inquiry = &cluster.Inquiry{}
	for i := range nodes {
		n := &nodes[i]
		one := &cluster.Asked{Identity: cluster.Identify(n), Lost: "asking its agent needs the verb patch on nodes, which you lack"}
		if gpus, known := judge.GPUsOf(n, cluster.ReportOf(n).Status); known {
			if answer, err := planFor(gpus, manifest.Configs{}, p.target); err == nil {
				answer.Notes = append(answer.Notes, "drawn from what its agent last reported")
				one.Answer = answer
			}
		}
		p.Nodes = append(p.Nodes, one)
	}
}
