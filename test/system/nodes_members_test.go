package system

import (
	"fmt"
	"strings"

	"github.com/dpserve/dpserve/client"
)

// spread is an app of independent ranks that are spread over the nodes.
func spread(name string, dp int) string {
	return strings.Replace(simApp(name, dp, "independent", "sim_step_ms: 10"), "    data_parallel:",
		"    placement_group_strategy: SPREAD\n    data_parallel:", 1)
}

// seats are an application's ranks by GROUP/RANK, without what changes from one moment to the next.
func seats(st *client.AppStatus) map[string]client.RankStatus {
	out := map[string]client.RankStatus{}
	for _, u := range st.Units {
		for i := range u.Ranks {
			k := &u.Ranks[i]
			out[fmt.Sprintf("%d/%d", k.Group, k.Rank)] = client.RankStatus{
				Group: k.Group, Rank: k.Rank, Node: k.Node, Phase: k.Phase, Epoch: k.Epoch,
				Incarnation: k.Incarnation, PID: k.PID, URL: k.URL,
			}
		}
	}
	return out
}

// on are the seats of one node.
func on(all map[string]client.RankStatus, node string) (out []string) {
	for seat := range all {
		if all[seat].Node == node {
			out = append(out, seat)
		}
	}
	return out
}

func alive(s *client.NodeStatus) bool { return s.State == "alive" }
