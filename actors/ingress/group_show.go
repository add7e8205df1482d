package ingress

import (
	"fmt"
	"slices"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/routing"
)

// cohortSpan is the length of one count of a cohortLog, which has as many as make a minute.
const cohortSpan = 10 * time.Second

// cohortLog counts the cohorts of a line: releases of prompts that make steps longer.
type cohortLog struct {
	all    client.Cohorts
	recent [time.Minute / cohortSpan]struct {
		client.Cohorts
		span time.Duration // number of the span that it counts
	}
}

// count adds the releases of a look.
func (c *cohortLog) count(releases []routing.GroupRelease, now time.Duration) {
	n := client.Cohorts{Count: 1}
	for i := range releases {
		if releases[i].Work == 0 {
			continue
		}
		n.Requests++
		if !slices.ContainsFunc(releases[:i], func(r routing.GroupRelease) bool {
			return r.Work > 0 && r.Rank == releases[i].Rank
		}) {
			n.Ranks++
		}
	}
	if n.Requests == 0 {
		return
	}
	span := now / cohortSpan
	r := &c.recent[int(span)%len(c.recent)]
	if r.span != span {
		r.Cohorts, r.span = client.Cohorts{}, span
	}
	r.Add(n)
	c.all.Add(n)
}

// lastMinute sums up what was counted in the last minute.
func (c *cohortLog) lastMinute(now time.Duration) (sum client.Cohorts) {
	for i := range c.recent {
		if now/cohortSpan-c.recent[i].span < time.Duration(len(c.recent)) {
			sum.Add(c.recent[i].Cohorts)
		}
	}
	return sum
}

// describeLine describes a queue that this ingress has.
func describeLine(g *groupQueue, s *client.GroupQueue, l *groupLine) {
	now := g.ar.in.clock()
	g.rows = g.ar.router.Load().GroupRanks(s.Group, g.rows[:0])
	s.IsHere, s.Held, s.Open, s.Ranks = true, len(l.Waiting()), l.Released(), len(g.rows)
	s.PaceMs, s.Rate = float64(l.Pace(now))/float64(time.Millisecond), l.Rate(now)
	s.Cohorts, s.LastMinute = l.cohorts.all, l.cohorts.lastMinute(now)
	if rule := g.rule.Load(); rule != nil {
		s.DecodeBalance = rule.DecodeBalance(g.rows)
	}
	if s.Held > 0 {
		held := l.held
		held.For = max(0, l.askAt-now)
		s.Why = held.String()
	}
}

// explainHolding says what the queue of a group would do with a request that arrived now, and the cohort that
// the request would go with. It changes nothing.
func explainHolding(g *groupQueue, q *routing.Request) []string {
	rule := g.rule.Load()
	w := groupWait{tokens: q.Tokens, hits: q.Hits}
	if rule == nil || q.HasDirect || len(q.Tried) > 0 ||
		!g.choose(&w, g.ar.revision.Load().app.NumGroups) {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if owner, known := g.owners[w.group]; known && owner != g.ar.in.node {
		return []string{fmt.Sprintf("node %s has the queue of group %d: ask it for the cohort", owner,
			w.group)}
	}
	line := routing.NewGroupLine(*rule)
	if l := g.lines[w.group]; l != nil {
		line = l.GroupLine
	}
	var look routing.GroupLook
	now, own := g.ar.in.clock(), routing.GroupWaiting{ID: q.ID, Tokens: q.Tokens, Hits: q.Hits}
	g.rows = g.ar.router.Load().GroupRanks(w.group, g.rows[:0])
	own.Since = now
	line.Preview(g.rows, now, &look, own)
	text := fmt.Sprintf("the queue of group %d would release it now", w.group)
	if look.Held.Reason != routing.GroupIdle {
		text = fmt.Sprintf("the queue of group %d would hold it: the oldest of %d %s", w.group,
			len(line.Waiting())+1, look.Held)
		// a line without prompts that are computed: by then the last cohort has its first tokens
		routing.NewGroupLine(*rule).Preview(g.rows, max(look.AskAt, now), &look,
			append(slices.Clone(line.Waiting()), own)...)
	}
	return []string{text + describeCohort(&look, q.ID)}
}

// describeCohort says how a request is part of a release.
func describeCohort(look *routing.GroupLook, id uint64) string {
	i := slices.IndexFunc(look.Releases, func(r routing.GroupRelease) bool { return r.ID == id })
	switch {
	case len(look.Releases) == 0:
		return ""
	case i < 0:
		return fmt.Sprintf("; %d others would go first", len(look.Releases))
	}
	return fmt.Sprintf("; it would go to rank %s, with %d others", look.Releases[i].Rank,
		len(look.Releases)-1)
}
