package routing

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// PairDecider is the closed list of how a PairRule decides between a prefill rank and a decode rank that
// computes the prompt itself.
type PairDecider uint8

const (
	// DecideISL uses a prefill rank if the decode rank has at least 2,048 tokens, and at least 30 % of the
	// prompt, to compute.
	DecideISL PairDecider = iota
	// DecidePrefillLoad uses a prefill rank unless the one that was chosen is above its busy threshold.
	DecidePrefillLoad
	// DecideUncached uses a prefill rank if the decode rank has at least PairRule.Least tokens to compute.
	DecideUncached
	// DecideAlways uses a prefill rank whenever that is possible.
	DecideAlways
	// DecideMex uses the pair with the lowest cost in milliseconds if that is 5 % below the cost of the
	// decode rank alone.
	DecideMex
)

const (
	islTokens = 2048
	islShare  = 0.3
	// heldTokens is N of "the decode rank holds all but N tokens": so short a prompt takes less time to
	// compute than a second leg. At most as many tokens of work stall the requests that decode there.
	heldTokens = 256
	// uncachedPrefix begins the decider that names its own N.
	uncachedPrefix = "uncached>="
	// maxLeast bounds that N: no engine has a longer context.
	maxLeast = 1 << 24
)

// The closed list of PairDecision.Reason while its Kind is Route. With another Kind it is the reason of the
// decode pool's policy.
const (
	PairLongPrefill    = "long_prefill"     // remote: isl, or the decode rank must compute at least N tokens
	PairPrefillHasRoom = "prefill_has_room" // remote: prefill-load
	PairAlways         = "always"           // remote: decider always, or the caller named the prefill rank
	PairRemoteCheaper  = "remote_cheaper"   // remote: mex

	// PairShortPrefill (local): isl, or the decode rank has less than N tokens to compute; under prefill-load
	// a prompt of a few tokens
	PairShortPrefill = "short_prefill"
	PairLocalCheaper = "local_cheaper" // local: mex
	PairDecodeHolds  = "decode_holds"  // local: the decode rank holds all but a few tokens of the prompt
	// PairPrefillQueue (local): the prompt would wait for the prefill rank longer than the decode rank needs
	// for its own queue and the prompt.
	PairPrefillQueue = "prefill_queue"
	// PairCannotSplit (local): the request has several sequences, or input that the transfer cannot move.
	PairCannotSplit = "cannot_split"

	// PairNoPrefill (local): no prefill rank is ready, or all of them failed this request.
	PairNoPrefill   = "no_prefill_rank"
	PairPrefillFull = "prefill_full" // local: no prefill rank has room
	PairPrefillBusy = "prefill_busy" // local: the prefill ranks are above their busy threshold
	// PairLeasesFull (local): finished prompts that wait for their decode ranks hold too much of the prefill
	// ranks' KV caches.
	PairLeasesFull   = "leases_full"
	PairNotPrewarmed = "not_prewarmed" // local: no prefill rank has met the decode rank since both started
)

// PairRule decides for a request whether a rank of the prefill pool computes its prompt, and which. It is
// pure like a Policy. Each pool has its own view, policy, parameters and busy threshold. The decode pool's
// policy chooses the rank of a request that is not split, and, except under DecideMex, of one that is.
type PairRule struct {
	Decider PairDecider
	Least   int // tokens: N of DecideUncached
	// NeedsMet: where a prefill rank would compute the prompt, but none has met the decode rank, another
	// decode rank is taken. An application without fall-back wants this.
	NeedsMet bool
}

// leavesOut reports whether another decode rank is to be chosen, because no prefill rank has met this one.
func (r *PairRule) leavesOut(d *Request, out *PairDecision) bool {
	return r.NeedsMet && !d.HasDirect && out.Kind == Route && !out.Remote && out.Reason == PairNotPrewarmed &&
		!slices.Contains(d.Tried, out.Decode)
}

// ParsePairRule reads what an application says under disaggregation.decide: isl, prefill-load, uncached>=N,
// always, mex. Nothing is isl.
func ParsePairRule(decide string) (PairRule, error) {
	rule := PairRule{}
	switch decide {
	case "", "isl":
	case "prefill-load":
		rule.Decider = DecidePrefillLoad
	case "always":
		rule.Decider = DecideAlways
	case "mex":
		rule.Decider = DecideMex
	default:
		text, isUncached := strings.CutPrefix(decide, uncachedPrefix)
		if !isUncached {
			return rule, problem.New(problem.InvalidArgument, "unknown decider %q", decide).
				WithHint("%s", didYouMean(decide, []string{
					"isl", "prefill-load", uncachedPrefix + "2048", "always", "mex",
				}, "deciders"))
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxLeast {
			return rule, problem.New(problem.InvalidArgument,
				"decider %q: want a number of tokens from 1 to %d behind %s", decide, maxLeast,
				uncachedPrefix)
		}
		rule.Decider, rule.Least = DecideUncached, n
	}
	return rule, nil
}

// PairPool is one pool's part of a pair decision.
type PairPool struct {
	View   *View
	Query  *Request // with what this pool's ranks hold of the prompt
	Choice *Decision
	Policy Policy // that made the choice
	State  State  // of the policy
}

// PairInput is the input of a pair decision.
type PairInput struct {
	Prefill, Decode PairPool
	Table           *PairTable
	CannotSplit     bool // the request must go to one rank
}

// PairDecision is a PairRule's answer. The caller owns and reuses it.
type PairDecision struct {
	Explain bool   // set by the caller: fill Candidates
	Kind    Kind   // Route, or the decode pool's Queue or Reject
	Remote  bool   // a prefill rank computes the prompt
	Prefill RankID // if Remote
	Decode  RankID // if Kind is Route
	Reason  string // constant from a closed list

	Candidates []PairCandidate // that were compared, when Explain; the decode rank alone comes last

	prefill, decode scratch
	rows            pairRows
}

// PairCandidate is a pair, or a decode rank alone, with every term of its cost in milliseconds.
type PairCandidate struct {
	Remote  bool   `json:"remote"`
	Prefill RankID `json:"prefill"` // if Remote
	Decode  RankID `json:"decode"`
	// why the pair could not be taken: PairLeasesFull, PairNotPrewarmed; "" = it could
	Skip  string  `json:"skip,omitempty"`
	Cost  float64 `json:"cost_ms"` // Σ Value of Terms
	Terms []Term  `json:"terms"`
}

// IsFallback reports whether the request goes without a prefill rank that it should have had: disaggregation
// works less well than it was asked to. An application with fallback fail refuses such requests.
func (d *PairDecision) IsFallback() bool {
	switch d.Reason {
	case PairNoPrefill, PairPrefillFull, PairLeasesFull, PairNotPrewarmed:
		return d.Kind == Route
	}
	return false
}

func (d *PairDecision) reset() {
	d.Kind, d.Remote, d.Prefill, d.Decode, d.Reason = Reject, false, 0, 0, ""
	d.Candidates = d.Candidates[:0]
}

// Decide decides for a request. Both pools' choices must be of the views in in.
func (r *PairRule) Decide(in *PairInput, rnd *rand.Rand, d *PairDecision) {
	d.reset()
	for _, pool := range [...]*PairPool{&in.Decode, &in.Prefill} {
		if choice := pool.Choice; choice.Kind != Route && (pool == &in.Decode || pool.isNamed()) {
			d.Kind, d.Reason = choice.Kind, choice.Reason
			return
		}
	}
	row, ok := in.Decode.View.Find(in.Decode.Choice.Ranked[0])
	if !ok { // the choice is of another view
		d.Reason = ReasonNoReadyRank
		return
	}
	local := &in.Decode.View.Ranks[row]
	d.Kind, d.Decode = Route, local.ID
	m := r.model(in, local)
	if d.Reason = r.reasonToSkip(in, &m.own); d.Reason == "" {
		m.gather(in, rnd, d)
		if m.byCost {
			m.decideByCost(in, rnd, d)
		} else {
			r.decideByThreshold(&m, in, d)
		}
	}
	if d.Explain {
		d.Candidates = append(d.Candidates, m.own.candidate(local.ID))
	}
}

// isPinned reports whether the caller, or the queue of a lockstep group, named the pool's rank. Then no other
// rank of the pool will do.
func (p *PairPool) isPinned() bool {
	_, isDirect := p.Policy.(Direct)
	return p.Query.HasDirect && (isDirect || p.Query.Force)
}

// isNamed reports whether the caller named the rank: no rule decides against it. A queue only says which rank
// of its group it would be.
func (p *PairPool) isNamed() bool { return p.isPinned() && !p.Query.Released }

// reasonToSkip is why the request stays on the decode rank whatever the prefill ranks have to do; "" if that
// depends on them.
func (r *PairRule) reasonToSkip(in *PairInput, own *localCost) string {
	uncached, all := own.uncached, int64(in.Decode.Query.Tokens)
	isShort := false
	switch r.Decider {
	case DecideISL:
		isShort = uncached < islTokens || float64(uncached) < islShare*float64(all)
	case DecideUncached:
		isShort = uncached < int64(r.Least)
	case DecidePrefillLoad, DecideAlways, DecideMex:
	}
	byLength := r.Decider == DecideISL || r.Decider == DecidePrefillLoad
	switch choice := in.Prefill.Choice; {
	case in.CannotSplit:
		return PairCannotSplit
	case in.Prefill.isNamed():
		return ""
	case byLength && uncached <= heldTokens && uncached < all:
		return PairDecodeHolds
	case isShort, byLength && uncached <= heldTokens:
		return PairShortPrefill
	case choice.Kind == Route:
		return ""
	case choice.Reason == ReasonNoRoom:
		return PairPrefillFull
	case choice.Reason == ReasonAllBusy:
		return PairPrefillBusy
	default:
		return PairNoPrefill
	}
}

// decideByThreshold takes the prefill policy's choice if it may be paired with the decode policy's choice,
// else the prefill rank on which the prompt is computed first.
func (r *PairRule) decideByThreshold(m *pairModel, in *PairInput, d *PairDecision) {
	if d.rows.nPrefills == 0 {
		d.Reason = d.rows.reason(PairNoPrefill)
		if in.Prefill.isNamed() {
			d.Kind, d.Reason = Reject, ReasonRankUnavailable
		}
		return
	}
	p := &d.rows.prefills[0]
	asked := r.Decider == DecideAlways || in.Prefill.isNamed()
	switch {
	case asked:
	case r.Decider == DecidePrefillLoad && isAboveBusy(in.Prefill.View, p.rank):
		d.Reason = PairPrefillBusy
		return
	case p.cost[termQueue] > m.own.terms[0]+m.own.terms[1]:
		d.Reason = PairPrefillQueue
		return
	}
	d.Remote, d.Prefill = true, p.rank.ID
	switch {
	case asked:
		d.Reason = PairAlways
	case r.Decider == DecidePrefillLoad:
		d.Reason = PairPrefillHasRoom
	default:
		d.Reason = PairLongPrefill
	}
}

// defaultPrefillBusy is the busy threshold of decider prefill-load where the prefill pool has none.
const defaultPrefillBusy = 0.9

// isAboveBusy reports whether rk is above its pool's busy threshold. A pool's policy leaves such ranks out as
// long as it has others.
func isAboveBusy(v *View, rk *Rank) bool {
	if v.HasBusyThreshold {
		return rk.Busy || rk.Usage() > v.BusyThreshold
	}
	return rk.Usage() > defaultPrefillBusy
}
