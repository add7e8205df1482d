package routing

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// How many ranks of each pool are compared pair by pair. The cost of a pair is the sum of a part per prefill
// rank and a part per decode rank, but for what is beyond the first token's goal; so the best pair is among
// the best ranks of both, unless too few of those have met.
const (
	mostPrefills = 4
	mostDecodes  = 8
	// remoteGain is how much cheaper a pair must be than the decode rank alone: predictions err by more.
	remoteGain = 0.95
)

// pairTerms are the terms of a pair's cost in their printed order, in ms. They are those of mex: the prefill
// rank's up to prefill_memory, by its pool's cost model and traffic, and the decode rank's, which has no
// prompt to compute. A decode rank that is a candidate has room, so there is no wait for a place.
type pairTerms [9]float64

const (
	termQueue = iota // prompts in front of it, on the prefill rank
	termPrefill
	termTransfer
	termLater
	termOwn
	termOthers
	termPrefillMemory // with the prompts that wait there for their decode ranks
	termDecodeMemory
	termBeyond
)

var pairLabels = [len(pairTerms{})]string{
	"queue", "prefill", "transfer", "later_arrivals", "own_tokens", "others_tokens", "prefill_memory",
	"decode_memory", "beyond_goal",
}

// isDecodeTerm says whose rank a term names.
var isDecodeTerm = [len(pairTerms{})]bool{
	termTransfer: true, termOwn: true, termOthers: true, termDecodeMemory: true,
}

// sum adds the terms in their printed order.
func (t *pairTerms) sum() (ms float64) {
	for _, x := range t {
		ms += x
	}
	return ms
}

// pairRow is a rank with its part of a pair's terms.
type pairRow struct {
	rank  *Rank
	cost  pairTerms
	moves int64   // tokens of the prompt that a decode rank does not hold
	sort  float64 // ms: ranks with less are compared first
}

// pairRows are the ranks that are compared.
type pairRows struct {
	prefills  [mostPrefills]pairRow
	decodes   [mostDecodes]pairRow
	nPrefills int
	nDecodes  int
	skip      string // why a prefill rank was left out; "" = none was
}

// reason is why no pair was taken: why ranks were left out, or otherwise.
func (r *pairRows) reason(otherwise string) string {
	if r.skip != "" {
		return r.skip
	}
	return otherwise
}

// insertRow keeps rows sorted and at most as many as there is room for. Of equal rows the first one stays in
// front.
func insertRow(rows []pairRow, n int, row *pairRow) int {
	if row.sort-row.sort != 0 { // NaN or infinite
		return n
	}
	i := n
	for i > 0 && rows[i-1].sort > row.sort {
		i--
	}
	if i == len(rows) {
		return n
	}
	n = min(n+1, len(rows))
	copy(rows[i+1:n], rows[i:n-1])
	rows[i] = *row
	return n
}

// localCost is what the request costs on a decode rank that computes the prompt itself: the cost of mex.
type localCost struct {
	uncached int64
	terms    mexTerms
	cost     float64
}

func (l *localCost) candidate(id RankID) PairCandidate {
	c := PairCandidate{Decode: id, Cost: l.cost, Terms: make([]Term, 0, len(mexLabels))}
	for n, ms := range l.terms {
		c.Terms = append(c.Terms, newTerm(id, label{mexLabels[n], "ms"}, ms, 1))
	}
	return c
}

// pairModel is what one decision charges by: mex for both pools.
type pairModel struct {
	prefill, decode mexCosts
	transfers       *transferTimes
	now             time.Duration
	byCost          bool
	choice          pairRow   // the decode policy's choice, as the decode rank of a pair
	own             localCost // the same rank alone
}

func (r *PairRule) model(in *PairInput, local *Rank) pairModel {
	m := pairModel{
		prefill: in.Prefill.costs(), decode: in.Decode.costs(),
		transfers: &in.Table.transfers, now: in.Decode.View.Now,
		byCost: r.Decider == DecideMex && !in.Prefill.isNamed(), choice: pairRow{rank: local},
	}
	m.prefill.later = delay(in.rho())
	m.decode.later = m.prefill.later
	hit := int64(in.Decode.View.hitOn(in.Decode.Query, local.ID))
	m.own.cost = m.decode.of(local, hit, &m.own.terms)
	m.own.uncached = m.decode.tokens - hit
	m.addDecodeTerms(&m.choice, hit)
	return m
}

// rho is the share of the time of all ranks that prefill takes. The pools have one: a prompt that the decode
// rank computes is work which the prefill ranks do not have, and the other way round.
func (in *PairInput) rho() float64 {
	p, d := in.Prefill.View, in.Decode.View
	n := float64(len(p.Ranks) + len(d.Ranks))
	return (p.Rho*float64(len(p.Ranks)) + d.Rho*float64(len(d.Ranks))) / max(n, 1)
}

// costs are those of the pool's policy if it is mex, with the traffic that it has seen; else those of mex
// with its defaults and no traffic.
func (p *PairPool) costs() mexCosts {
	if mex, ok := p.Policy.(Mex); ok {
		return mex.costs(p.Query, p.View, p.State)
	}
	return defaultPairMex.costs(p.Query, p.View, nil)
}

// defaultPairMex has the documented goals of mex.
var defaultPairMex = Mex{TTFT: 2000, TPOT: 50}

// gather fills d.rows: the prefill ranks that may compute the prompt, and the decode ranks that may be paired
// with one if that is decided by cost. Without it, only the decode policy's choice may have the pair, and the
// prefill policy's choice comes first.
func (m *pairModel) gather(in *PairInput, rnd *rand.Rand, d *PairDecision) {
	d.rows = pairRows{}
	rows, c, v := &d.rows, &d.prefill, in.Prefill.View
	choice, isPinned := in.Prefill.Choice.Ranked[0], in.Prefill.isPinned()
	hasChoice := !m.byCost && m.addChoice(in, rows, choice)
	if hasChoice && !d.Explain {
		return
	}
	gather(in.Prefill.Query, v, c)
	alignHits(in.Prefill.Query, v, c)
	c.creditNewRanks(in.Prefill.Query, v)
	for _, i := range startAnywhere(c.candidates, rnd) {
		row := pairRow{rank: &v.Ranks[i]}
		if hasChoice && row.rank.ID == choice || isPinned && row.rank.ID != choice {
			continue
		}
		skip := in.Table.skipPrefill(row.rank, in.Prefill.Query.Tokens)
		if skip == "" && !m.byCost {
			skip = in.Table.skipPair(row.rank, m.choice.rank)
		}
		if skip != "" {
			rows.skip = skip
			if d.Explain {
				m.addPrefillTerms(&row, c.hits[i], in.Table.Leased(row.rank))
				m.explain(d, &row, &m.choice, skip)
			}
			continue
		}
		m.addPrefillTerms(&row, c.hits[i], in.Table.Leased(row.rank))
		row.sort = row.cost[termQueue] + row.cost[termPrefill]
		if m.byCost {
			row.sort += row.cost[termLater] + row.cost[termPrefillMemory]
		}
		rows.nPrefills = insertRow(rows.prefills[:], rows.nPrefills, &row)
	}
	if !m.byCost {
		if d.Explain {
			for i := range rows.prefills[:rows.nPrefills] {
				m.explain(d, &rows.prefills[i], &m.choice, "")
			}
		}
		return
	}
	if in.Decode.isPinned() {
		rows.nDecodes = insertRow(rows.decodes[:], 0, &m.choice)
		return
	}
	c, v = &d.decode, in.Decode.View
	gather(in.Decode.Query, v, c)
	alignHits(in.Decode.Query, v, c)
	for _, i := range startAnywhere(c.candidates, rnd) {
		row := pairRow{rank: &v.Ranks[i]}
		if !in.Table.hasPartner(row.rank) {
			continue
		}
		m.addDecodeTerms(&row, c.hits[i])
		row.sort = row.cost.sum() + m.transfers.usualMS(row.moves)
		rows.nDecodes = insertRow(rows.decodes[:], rows.nDecodes, &row)
	}
}

// addChoice adds the prefill policy's choice alone, which is enough where it may be paired.
func (m *pairModel) addChoice(in *PairInput, rows *pairRows, choice RankID) bool {
	q, v := in.Prefill.Query, in.Prefill.View
	i, ok := v.Find(choice)
	if !ok {
		return false
	}
	row := pairRow{rank: &v.Ranks[i], sort: -1}
	if in.Table.skipPrefill(row.rank, q.Tokens) != "" || in.Table.skipPair(row.rank, m.choice.rank) != "" {
		return false
	}
	m.addPrefillTerms(&row, int64(v.hitOn(q, choice)), in.Table.Leased(row.rank))
	if wait := row.cost[termQueue] + row.cost[termPrefill]; !(wait >= 0) || math.IsInf(wait, 1) {
		return false // a fault of the rank's reports
	}
	rows.nPrefills = insertRow(rows.prefills[:], 0, &row)
	return true
}

// startAnywhere rotates rows by a random number: of many equal ranks, not always the first ones are compared.
// The rotation is done in place.
func startAnywhere(rows []int32, rnd *rand.Rand) []int32 {
	if len(rows) < 2 {
		return rows
	}
	k := rnd.IntN(len(rows))
	slices.Reverse(rows[:k])
	slices.Reverse(rows[k:])
	slices.Reverse(rows)
	return rows
}

// addPrefillTerms adds a prefill rank's part. leased tokens wait there for their decode ranks.
func (m *pairModel) addPrefillTerms(row *pairRow, hit, leased int64) {
	var terms mexTerms
	m.prefill.of(row.rank, hit, &terms)
	row.cost[termQueue], row.cost[termPrefill], row.cost[termLater] = terms[0], terms[1], terms[2]
	l, all := &row.rank.Load, row.rank.Capacity
	if asked := l.K + l.Kq + leased + m.prefill.tokens; all > 0 && asked > all {
		row.cost[termPrefillMemory] = kvPressure * m.decode.goal * (float64(asked)/float64(all) - 1)
	}
}

// addDecodeTerms adds a decode rank's part. The rank holds hit tokens of the prompt and computes nothing.
func (m *pairModel) addDecodeTerms(row *pairRow, hit int64) {
	var terms mexTerms
	m.decode.of(row.rank, m.decode.tokens, &terms)
	row.moves = m.decode.tokens - hit
	row.cost[termOwn], row.cost[termOthers], row.cost[termDecodeMemory] = terms[3], terms[4], terms[5]
}

// pair is the cost of a pair from its two parts and the transfer between them.
func (m *pairModel) pair(p, d *pairRow) (terms pairTerms) {
	for n := range terms {
		terms[n] = p.cost[n] + d.cost[n] // one of them is 0
	}
	terms[termTransfer] = m.transfers.ms(p.rank, d.rank, d.moves, m.now)
	if first := terms[termQueue] + terms[termPrefill] + terms[termTransfer]; m.decode.late &&
		first > m.decode.goal {
		terms[termBeyond] = m.decode.goal*(1+math.Log(first/m.decode.goal)) - first
	}
	return terms
}

// decideByCost takes the cheapest pair if it is enough cheaper than the decode rank alone. Equal costs are
// drawn.
func (m *pairModel) decideByCost(in *PairInput, rnd *rand.Rand, d *PairDecision) {
	rows, least, equals := &d.rows, math.Inf(1), 0
	var p, q *pairRow
	for i := range rows.prefills[:rows.nPrefills] {
		for k := range rows.decodes[:rows.nDecodes] {
			a, b := &rows.prefills[i], &rows.decodes[k]
			terms := m.pair(a, b)
			cost := terms.sum()
			if d.Explain {
				m.explain(d, a, b, in.Table.skipPair(a.rank, b.rank))
			}
			switch {
			case cost-cost != 0 || cost > least || in.Table.skipPair(a.rank, b.rank) != "":
				continue
			case cost < least:
				p, q, least, equals = a, b, cost, 1
			default:
				if equals++; rnd.IntN(equals) == 0 {
					p, q = a, b
				}
			}
		}
	}
	switch {
	case rows.nPrefills == 0:
		d.Reason = rows.reason(PairNoPrefill)
	case p == nil:
		d.Reason = PairNotPrewarmed
	case !(least <= remoteGain*m.own.cost): // a cost that is no number stays local
		d.Reason = PairLocalCheaper
	default:
		d.Remote, d.Prefill, d.Decode, d.Reason = true, p.rank.ID, q.rank.ID, PairRemoteCheaper
	}
}

// explain adds a pair to the candidates.
func (m *pairModel) explain(d *PairDecision, p, q *pairRow, skip string) {
	terms := m.pair(p, q)
	c := PairCandidate{
		Remote: true, Prefill: p.rank.ID, Decode: q.rank.ID, Skip: skip, Cost: terms.sum(),
		Terms: make([]Term, 0, len(terms)),
	}
	for n, ms := range terms {
		id := p.rank.ID
		if isDecodeTerm[n] {
			id = q.rank.ID
		}
		c.Terms = append(c.Terms, newTerm(id, label{pairLabels[n], "ms"}, ms, 1))
	}
	d.Candidates = append(d.Candidates, c)
}
