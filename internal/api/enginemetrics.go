package api

import (
	"cmp"
	"compress/gzip"
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/promtext"
	"github.com/dpserve/dpserve/internal/state"
)

// Limits of /metrics/engines. How many engines a node asks at the same time, and for how long, is the node's.
const (
	// enginePagesTimeout bounds the questions to all nodes. It is below the 10 s that Prometheus gives a
	// scrape by default, so that ranks that answer are not lost with those that do not.
	enginePagesTimeout = 8 * time.Second
	maxEnginePages     = 64 << 20  // bytes of all pages as the engines write them
	maxMergedPage      = 128 << 20 // bytes of the merged page, about
	maxEngineScrapes   = 2         // at the same time
)

// The gauges that /metrics/engines adds to those of the engines.
const (
	gaugeEngineUp      = "dpserve_engine_metrics_up"
	gaugeEngineSkipped = "dpserve_engine_metrics_skipped_lines"
)

// engineMetrics answers /metrics/engines.
type engineMetrics struct {
	views func() NodeViews
	state func() *state.State
	slots chan struct{} // one per scrape
}

// NewEngineMetrics makes the handler of /metrics/engines: the metrics pages of the engines of all ranks on
// all nodes, merged into one. views are the nodes that can be asked, and the state says which ranks there
// are.
func NewEngineMetrics(views func() NodeViews, st func() *state.State) http.Handler {
	return &engineMetrics{views: views, state: st, slots: make(chan struct{}, maxEngineScrapes)}
}

func (m *engineMetrics) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	select {
	case m.slots <- struct{}{}:
		defer func() { <-m.slots }()
	default:
		WriteError(w, problem.New(problem.Overloaded, "%d scrapes of all engines run already", cap(m.slots)).
			WithHint("let fewer scrapers ask "+pathEngineMetrics+", or less often"))
		return
	}
	page := mergePages(m.views().enginePages(r.Context()), ranksOf(m.state()))
	extendWriteDeadline(w)
	w.Header().Set("Content-Type", promtext.ContentType)
	if !strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		_ = page.Print(w) // an error means that the client has left
		return
	}
	w.Header().Set("Content-Encoding", "gzip")
	zip, _ := gzip.NewWriterLevel(w, gzip.BestSpeed) // the level is valid
	_ = page.Print(zip)
	_ = zip.Close()
}

// enginePages asks every node for the pages of its engines. What does not come in time, or does not fit, is
// left out. The pages are in the order of the ranks, one for each engine.
func (v NodeViews) enginePages(ctx context.Context) []*msg.EnginePage {
	var mu sync.Mutex
	var pages []*msg.EnginePage
	size := 0
	_ = v.ask(ctx, enginePagesTimeout, func(ctx context.Context, _ string, node msg.NodeView) error {
		return node.EngineMetrics(ctx, func(p *msg.EnginePage) error {
			mu.Lock()
			defer mu.Unlock()
			if size+len(p.Text) > maxEnginePages {
				return promtext.ErrFull
			}
			size += len(p.Text)
			pages = append(pages, p)
			return nil
		})
	})
	slices.SortFunc(pages, func(a, b *msg.EnginePage) int {
		return cmp.Or(compareRanks(rankOf(a, 0), rankOf(b, 0)), -cmp.Compare(a.Epoch, b.Epoch))
	})
	// an engine that ends may answer beside the next one of its rank
	return slices.CompactFunc(pages, func(a, b *msg.EnginePage) bool { return rankOf(a, 0) == rankOf(b, 0) })
}

// mergePages merges the pages and adds the gauges of dpserve. ranks are those that should have a page.
func mergePages(pages []*msg.EnginePage, ranks []engineRank) *promtext.Page {
	out := promtext.New(maxMergedPage)
	out.Declare(gaugeEngineUp, "1 if this page has the metrics of the rank's engine, 0 if they did not come.")
	out.Declare(gaugeEngineSkipped, "Lines of the engine's page that are not in this page.")
	isUp := map[engineRank]bool{}
	for _, r := range ranks {
		isUp[r] = false
	}
	for _, p := range pages {
		skipped, err := out.Add(&p.Source)
		for i := range p.Ranks {
			isUp[rankOf(p, i)] = err == nil
		}
		if skipped > 0 {
			r := rankOf(p, 0)
			out.Set(gaugeEngineSkipped, r.app, r.pool, r.group, r.rank, skipped)
		}
	}
	all := make([]engineRank, 0, len(isUp))
	for r := range isUp {
		all = append(all, r)
	}
	slices.SortFunc(all, compareRanks)
	for _, r := range all {
		value := 0
		if isUp[r] {
			value = 1
		}
		out.Set(gaugeEngineUp, r.app, r.pool, r.group, r.rank, value)
	}
	return out
}

// engineRank names a rank in the labels of its metrics.
type engineRank struct {
	app, pool   string
	group, rank int
}

func compareRanks(a, b engineRank) int {
	return cmp.Or(cmp.Compare(a.app, b.app), cmp.Compare(a.pool, b.pool), a.group-b.group, a.rank-b.rank)
}

// rankOf is one of the ranks of an engine.
func rankOf(p *msg.EnginePage, i int) engineRank {
	return engineRank{p.App, p.Pool, p.Group, p.Ranks[i].Number}
}

// ranksOf are the ranks of all units.
func ranksOf(st *state.State) []engineRank {
	var out []engineRank
	for _, u := range st.Units {
		for _, r := range u.Ranks {
			out = append(out, engineRank{u.App, u.Pool, u.Group, r.Rank})
		}
	}
	return out
}
