package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/client"
)

// States of a node in which it does not do its work.
const (
	nodeLost    = "lost"
	nodeSilent  = "silent"
	nodeUnknown = "unknown"
)

func checkNodes(f *Facts) []Finding {
	c, out := f.Cluster, &findings{check: "node"}
	switch {
	case c == nil:
		return nil
	case c.Error != "" && !c.Wanted:
		out.ok("none answers at %s, so that no running application was looked at", c.Address)
		return out.list
	case c.Error != "":
		out.fail(cmp.Or(c.Hint, "`dpserve start` starts one; --addr or DPSERVE_ADDR names another"), "%s",
			c.Error)
		return out.list
	}
	for i := range c.Nodes {
		judgeNode(out, &c.Nodes[i])
	}
	return out.orOK("%s (dpserve %s) answers at %s; %s in the cluster", c.Node, c.Version, c.Address,
		formatCount(len(c.Nodes), "node"))
}

func judgeNode(out *findings, n *client.NodeStatus) {
	switch n.State {
	case nodeLost:
		out.fail("start dpserve there again, or `dpserve nodes remove "+n.Node+"`", "%s is lost: %s", n.Node,
			n.Reason)
	case nodeSilent, nodeUnknown:
		out.warn("look at the log of dpserve and at the network of "+n.Node, "%s is %s: %s", n.Node, n.State,
			n.Reason)
	}
	isSkewed := (time.Duration(n.SkewMs) * time.Millisecond).Abs() >= notedSkew
	for _, note := range n.Notes {
		if isSkewed && strings.Contains(note, "clock") {
			continue // the check of the clocks says so
		}
		out.warn("`dpserve nodes -o wide` shows all nodes", "%s: %s", n.Node, note)
	}
}

// checkBlockSizes compares the KV block sizes of an application's ranks, and with that of its Router. A
// prompt is looked up in blocks of one size: a rank with another size has no hits.
func checkBlockSizes(f *Facts) []Finding {
	out := &findings{check: "block-size"}
	if f.Cluster == nil {
		return nil
	}
	known := false
	for i := range f.Cluster.Apps {
		a := &f.Cluster.Apps[i]
		sizes := rankBlockSizes(a)
		known = known || len(sizes) > 0
		switch router := f.Cluster.RouterBlocks[a.Name]; {
		case len(sizes) > 1:
			out.fail("give all engines the same --block-size, in engine.args of "+a.Name,
				"the ranks of %s have KV blocks of several sizes: %s", a.Name, describeSizes(sizes))
		case router > 0 && len(sizes) == 1 && sizes[router] == nil:
			out.fail("`dpserve router reset "+a.Name+"`; if that changes nothing, the engines changed their "+
				"block size after they were ready: restart them",
				"%s routes by blocks of %d tokens, its ranks have %s", a.Name, router, describeSizes(sizes))
		default:
			noteBlockSizes(out, a)
		}
	}
	if !known {
		return out.list
	}
	return out.orOK("the ranks of each application agree with each other and with its Router")
}

// noteBlockSizes repeats what a rank itself says of its block size: its engine chose another one than it was
// asked for, or its events differ from its report.
func noteBlockSizes(out *findings, a *client.AppStatus) {
	for name, rank := range ranksOf(a) {
		if rank.KV == nil {
			continue
		}
		for note := range strings.SplitSeq(rank.KV.Note, "; ") {
			if strings.Contains(note, " tokens, ") {
				out.warn("write the size that the engine uses as block_size into engine.args",
					"%s: %s", name, note)
			}
		}
	}
}

// rankBlockSizes returns the ranks by their block size.
func rankBlockSizes(a *client.AppStatus) map[int][]string {
	out := map[int][]string{}
	for name, rank := range ranksOf(a) {
		if rank.KV != nil && rank.KV.BlockSize > 0 {
			out[rank.KV.BlockSize] = append(out[rank.KV.BlockSize], name)
		}
	}
	return out
}

func describeSizes(sizes map[int][]string) string {
	var parts []string
	for _, size := range slices.Sorted(maps.Keys(sizes)) {
		parts = append(parts, fmt.Sprintf("%d tokens (%s)", size, some(sizes[size])))
	}
	return strings.Join(parts, ", ")
}

// requestsWithoutEvents is how many requests a rank may end before a missing first KV event is a fault. A
// prompt of less than one block gives no event.
const requestsWithoutEvents = 20

// checkEvents looks for ranks whose engines should publish KV events and do not: routing then goes by what
// each rank was sent.
func checkEvents(f *Facts) []Finding {
	out := &findings{check: "kv-events"}
	if f.Cluster == nil {
		return nil
	}
	sources := 0
	for i := range f.Cluster.Apps {
		a := &f.Cluster.Apps[i]
		for name, rank := range ranksOf(a) {
			if rank.KV == nil || rank.KV.Events == nil {
				continue
			}
			sources++
			judgeEvents(out, a, name, rank)
		}
	}
	if sources == 0 {
		return nil
	}
	return out.orOK("the events of %s are followed", formatCount(sources, "rank"))
}

func judgeEvents(out *findings, a *client.AppStatus, name string, rank *client.RankStatus) {
	hint := "look for ZMQ errors in `dpserve logs " + name + "`, and restart the rank"
	if a.Kind == "attach" {
		hint = "look at the engine's --kv-events-config: its endpoint is the rank's kv_events in the app file"
	}
	e := rank.KV.Events
	neverCame := e.Batches == 0 && rank.Requests >= requestsWithoutEvents
	switch {
	case e.State == client.EventsSilent:
		out.fail(hint, "%s: no KV event for %.0f s while requests complete", name, e.SilentFor)
	case neverCame && e.State == client.EventsConnecting:
		out.fail(hint, "%s: its event socket is not connected after %d requests", name, rank.Requests)
	case neverCame:
		out.fail(hint, "%s: no KV event has come, and %d requests have ended", name, rank.Requests)
	case e.Dropped > 0:
		out.warn("`dpserve status -o json` counts them; another engine version may send other events",
			"%s: %d KV events were dropped because they are malformed or contradict others", name, e.Dropped)
	}
}

// checkBalance looks for ranks with much more load than the others of their pool.
func checkBalance(f *Facts) []Finding {
	out := &findings{check: "balance"}
	if f.Cluster == nil || len(f.Cluster.Apps) == 0 {
		return nil
	}
	for i := range f.Cluster.Apps {
		for _, im := range f.Cluster.Apps[i].Imbalances {
			hint := "`dpserve route explain` shows what outweighs the load; docs/routing.md has the policies"
			if len(im.Policies) > 0 {
				hint = "write routing: {policy: " + im.Policies[0] + "} into the file of " + im.Pool +
					" and deploy it; no engine restarts"
			}
			out.warn(hint, "%s: %s", im.Pool, &im)
		}
	}
	return out.orOK("no rank has much more load than the others of its pool")
}

// ranksOf yields the ranks of an application with their names, APP/GROUP/RANK. Of a rank of a pool, APP is
// the name of the pool.
func ranksOf(a *client.AppStatus) func(func(string, *client.RankStatus) bool) {
	return func(yield func(string, *client.RankStatus) bool) {
		for i := range a.Units {
			pool, _, _ := strings.Cut(a.Units[i].Unit, "/")
			for j := range a.Units[i].Ranks {
				r := &a.Units[i].Ranks[j]
				name := pool + "/" + strconv.Itoa(r.Group) + "/" + strconv.Itoa(r.Rank)
				if !yield(name, r) {
					return
				}
			}
		}
	}
}
