package transfer

import "github.com/dpserve/dpserve/internal/engine/openai"

// sim is the transfer of simulated engines. It has the fields of nixl; its parameters may hold other things,
// block names for instance. A pair of one simulated and one real engine must not exist: a block name ends a
// real decode engine, so nixl refuses such parameters. What the simulated decode engine refuses itself is
// left to it, so that tests meet its failures.
type sim struct{}

// simTraits have the two routes that the simulated engine serves, and the lease of nixl.
var simTraits = Traits{
	Name: SimName, Order: PrefillFirst, HasParams: true, Lease: DefaultLease, TakesPlain: true,
	routes: []Route{Completions, Chat}, limits: true,
}

// Traits implements Transfer.
func (sim) Traits() *Traits { return &simTraits }

// Begin implements Transfer.
func (sim) Begin(_ *Request, id string, _ Peer, _ func(n uint64) uint64) (Attempt, error) {
	return Attempt{ID: id, prefill: []byte(producerParams)}, nil
}

// Check implements Transfer. As with nixl, blocks of fewer tokens than the prompt has are those of another
// prompt.
func (sim) Check(a *Answer) Failure {
	switch {
	case a.Ending == EndedOtherwise:
		return PrefillBroken
	case len(a.Params) == 0:
		return PrefillNoParams
	}
	if !readSimParams(a) || a.RemoteTokens >= 0 && a.RemoteTokens < a.PromptTokens {
		return PrefillUnfit
	}
	return NoFailure
}

// readSimParams reads the counts of a simulated engine's parameters, and reports whether they are those of a
// prefill leg whose blocks are kept. Block ids may be numbers or words, and other fields may have any name
// and type: they reach the decode rank as they are.
func readSimParams(a *Answer) bool {
	isKept := false
	err := openai.Members(a.Params, func(key []byte, _, v openai.Span) error {
		raw := a.Params[v.Start:v.End]
		switch string(key) {
		case "do_remote_prefill":
			isKept = raw[0] == 't'
		case "remote_num_tokens":
			a.RemoteTokens = tokens(raw)
		case "remote_prefill_cached_tokens":
			if n := tokens(raw); n >= 0 {
				a.CachedTokens = n
			}
		}
		return nil
	})
	return err == nil && isKept
}
