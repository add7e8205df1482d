package server

import (
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/internal/tracing"
)

// metricsHandler returns /metrics: it updates the gauges of the node, of pools, ranks and KV caches, then
// answers.
func metricsHandler(n *Node) http.Handler {
	pages := n.metrics.Handler()
	disk := diskSpace{ask: diskfile.Space}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.nodeMetrics.Show(n.sampleNode(&disk))
		n.metrics.ShowPools(samplePools(n.store.State()))
		var samples []telemetry.RankSample
		var indexes []telemetry.AppIndex
		var groups []telemetry.GroupSample
		for unit, ranks := range n.node.RankStatuses() {
			name, _, _ := strings.Cut(unit, "/")
			for i := range ranks {
				samples = append(samples, sampleOf(name, &ranks[i]))
			}
		}
		if n.ingress != nil {
			for _, p := range n.store.State().Pools() {
				name := p.PoolName()
				if ix := n.ingress.Index(name); ix != nil {
					indexes = append(indexes, telemetry.AppIndex{
						App: name, Blocks: ix.Blocks, Bytes: ix.Bytes, Evicted: ix.Evicted,
					})
				}
				groups = appendGroups(groups, name, n.ingress.GroupQueues(name))
			}
		}
		n.metrics.ShowRanks(samples, indexes, groups)
		pages.ServeHTTP(w, r)
	})
}

// newTracer makes the tracer that the OTEL_ variables ask for; nil if they ask for none. The ingress closes
// it.
func (n *Node) newTracer() *tracing.Tracer {
	return tracing.FromEnvironment(n.life.ctx, tracing.Config{
		Node: n.cfg.NodeID, Version: n.cfg.Version, Count: n.metrics.Traces(), Log: n.log,
	})
}

// diskPatience is how long a scrape waits for the disk of the data dir.
const diskPatience = time.Second

// diskSpace reads how much space a folder's disk has. A disk that hangs holds the call, so it is not asked
// again before it has answered.
type diskSpace struct {
	ask   func(dir string) (free, size uint64, err error)
	asked atomic.Bool
}

// read returns the bytes of the disk, 0 if they are not known.
func (d *diskSpace) read(dir string) (free, size uint64) {
	if dir == "" || !d.asked.CompareAndSwap(false, true) {
		return 0, 0
	}
	var is struct{ free, size uint64 }
	err := diskfile.Await(dir, diskPatience, func() (err error) {
		defer d.asked.Store(false)
		is.free, is.size, err = d.ask(dir)
		return err
	})
	if err != nil {
		return 0, 0
	}
	return is.free, is.size
}

func (n *Node) sampleNode(disk *diskSpace) *telemetry.NodeSample {
	_, leads := n.leading.Current()
	s := &telemetry.NodeSample{LeaseSeconds: n.node.LeaseLeft().Seconds(), Leads: leads}
	for _, m := range n.members() {
		if m.Voter {
			s.Voters++
			if n.peering == nil || n.peering.Neighbours.IsHeard(m.UID) {
				s.VotersHeard++
			}
		}
	}
	if n.peering != nil {
		s.CertificateExpiry = n.peering.Certificates.ExpiresAt().Unix()
	}
	s.DiskFree, s.DiskSize = disk.read(n.cfg.DataDir)
	return s
}

// samplePools counts the ranks of each pool, as each node of the cluster knows them.
func samplePools(s *state.State) []telemetry.PoolSample {
	var out []telemetry.PoolSample
	for a, pool := range s.Pools() {
		sample := telemetry.PoolSample{App: pool.PoolName()}
		wanted := map[string]bool{}
		if !a.Deleting {
			for _, w := range pool.Units() {
				wanted[w.ID] = true
				sample.Desired += len(w.Ranks)
			}
		}
		for id, u := range s.Units {
			if u.App != pool.Name || u.Pool != pool.Pool {
				continue
			}
			if wanted[id] && u.Phase == state.Ready {
				sample.Ready += len(u.Ranks)
			}
			sample.Units = append(sample.Units, telemetry.UnitSample{
				Unit: id, Epoch: u.Epoch, Restarts: u.Restarts,
			})
		}
		out = append(out, sample)
	}
	return out
}

// sampleOf is a rank in the form of the metrics.
func sampleOf(app string, r *client.RankStatus) telemetry.RankSample {
	out := telemetry.RankSample{
		App: app, Group: r.Group, Rank: r.Rank, InFlight: r.InFlight, Ejected: r.Ejected,
	}
	if kv := r.KV; kv != nil {
		out.KV = &telemetry.KVSample{
			Blocks: kv.Blocks, Bytes: kv.Bytes, Orphans: kv.Orphans, Evicted: kv.Evicted,
		}
		if e := kv.Events; e != nil {
			out.KV.Events, out.KV.Silent = true, e.State == client.EventsSilent
			out.KV.Batches, out.KV.Gaps, out.KV.Restarts, out.KV.Dropped = e.Batches, e.Gaps, e.Restarts,
				e.Dropped
			out.KV.Unknown = e.UnknownMembers
		}
	}
	if t := r.Transfer; t != nil {
		out.Transfer = &telemetry.TransferSample{
			Count: t.Count, Bytes: t.Bytes, Failed: t.Failed, Expired: t.Expired, LateReads: t.LateReads,
			Seconds: t.TotalMs / 1000,
		}
	}
	return out
}

// appendGroups appends the queues of lockstep groups that this node has.
func appendGroups(into []telemetry.GroupSample, app string,
	queues []client.GroupQueue,
) []telemetry.GroupSample {
	for i := range queues {
		if q := &queues[i]; q.IsHere {
			into = append(into, telemetry.GroupSample{
				App: app, Group: q.Group, Held: q.Held, Open: q.Open, PaceMs: q.PaceMs,
				DecodeBalance: q.DecodeBalance, Cohorts: q.Cohorts.Count, CohortRequests: q.Cohorts.Requests,
				OnRanks: q.Cohorts.Ranks,
			})
		}
	}
	return into
}
