package transfer

import (
	"bytes"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// nixl is vLLM's NixlConnector in its pull form: the prefill leg is answered with parameters that name the
// blocks, and the decode engine reads them. Nothing fences the reading: see Params.
type nixl struct{ traits *Traits }

// nixlTraits hold for 0.32.0 of vLLM, whose five generating routes all answer with parameters.
var nixlTraits = Traits{
	Name: NixlName, Order: PrefillFirst, HasParams: true, Lease: DefaultLease, TakesPlain: true,
	routes: []Route{Completions, Chat, Responses, Messages, Generate}, limits: true,
}

// producerParams asks a prefill engine to keep the blocks. The first key is what counts; the nulls are what
// all clients of the connector send.
const producerParams = kvParams + `{"do_remote_decode":true,"do_remote_prefill":false,` +
	`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// Traits implements Transfer.
func (t nixl) Traits() *Traits { return t.traits }

// Begin implements Transfer.
func (t nixl) Begin(_ *Request, id string, _ Peer, _ func(n uint64) uint64) (Attempt, error) {
	return Attempt{ID: id, prefill: []byte(producerParams)}, nil
}

// Check implements Transfer. Parameters that lack what the decode engine needs are never completed: one wrong
// key ends that engine. Blocks of fewer tokens than the prompt has are those of another prompt, as with
// several prompts in one body.
func (t nixl) Check(a *Answer) Failure {
	switch {
	case a.Ending == EndedOtherwise:
		return PrefillBroken
	case len(a.Params) == 0:
		return PrefillNoParams
	case !a.readPull():
		return PrefillUnfit
	case a.RemoteTokens >= 0 && a.RemoteTokens < a.PromptTokens:
		return PrefillUnfit
	}
	return NoFailure
}

// readPull reads the fields of pull parameters that a decode engine takes without a default, and reports
// whether all are there in the form it needs. An engine ends if block ids are missing, flat or words, and
// hangs or ends without remote_request_id.
func (a *Answer) readPull() bool {
	const flag, blocks, engine, request, host, port = 1, 2, 4, 8, 16, 32
	seen, wrongMode := 0, false
	mark := func(bit int, ok bool) {
		seen &^= bit // the last member of a name counts
		if ok {
			seen |= bit
		}
	}
	err := openai.Members(a.Params, func(key []byte, _, v openai.Span) error {
		raw := a.Params[v.Start:v.End]
		switch string(key) {
		case "do_remote_prefill":
			mark(flag, raw[0] == 't')
		case "remote_block_ids":
			mark(blocks, isBlockLists(raw))
		case "remote_engine_id":
			mark(engine, isText(raw))
		case "remote_request_id":
			mark(request, isText(raw))
		case "remote_host":
			mark(host, isText(raw))
		case "remote_port":
			mark(port, tokens(raw) > 0)
		case "transfer_mode":
			wrongMode = raw[0] == '"' && string(raw) != `"pull"`
		case "remote_num_tokens":
			a.RemoteTokens = tokens(raw)
		case "remote_prefill_cached_tokens":
			if n := tokens(raw); n >= 0 {
				a.CachedTokens = n
			}
		}
		return nil
	})
	return err == nil && seen == flag|blocks|engine|request|host|port && !wrongMode
}

// isText reports whether a checked value is a string that is not empty.
func isText(raw []byte) bool { return raw[0] == '"' && len(raw) > 2 }

// isBlockLists reports whether a checked value is a list of lists of block numbers, at least one in all.
func isBlockLists(raw []byte) bool {
	if raw[0] != '[' || bytes.ContainsAny(raw, `"{}.eE-tfn`) {
		return false
	}
	isNested, any := true, false
	openai.Elements(raw, func(e openai.Span) bool {
		inner := raw[e.Start:e.End]
		if isNested = inner[0] == '['; isNested {
			inner = inner[1 : len(inner)-1]
			isNested = bytes.IndexByte(inner, '[') < 0
			any = any || bytes.ContainsAny(inner, "0123456789")
		}
		return isNested
	})
	return isNested && any
}
