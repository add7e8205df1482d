package transfer

import (
	"bytes"
	"encoding/json"
	"strconv"

	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
)

// nixl is vLLM's NixlConnector in its pull form: the prefill leg is answered with parameters that name the
// blocks, and the decode engine reads them. Nothing fences the reading: see Params.
type nixl struct{}

// nixlTraits hold for 0.32.0 of vLLM.
var nixlTraits = Traits{
	Name: NixlName, Order: dispatch.PrefillFirst, HasParams: true, Lease: dispatch.DefaultLease,
	TakesPlain: true, limits: true,
}

// producerParams asks a prefill engine to keep the blocks. The first key is what counts; the nulls are what
// all clients of the connector send.
const producerParams = kvParams + `{"do_remote_decode":true,"do_remote_prefill":false,` +
	`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`

func (nixl) Traits() *Traits { return &nixlTraits }

func (nixl) Begin(_ *Request, id string, _ Peer, _ func(n uint64) uint64) (Attempt, error) {
	return Attempt{ID: id, prefill: []byte(producerParams)}, nil
}

// Check implements Transfer. Parameters that lack what the decode engine needs are never completed: one wrong
// key ends that engine.
func (nixl) Check(a *Answer) Failure { return a.check(a.readPull) }

// check is Check of a transfer whose answers have parameters; isFit reads those. Blocks of fewer tokens than
// the prompt has are those of another prompt, as with several prompts in one body.
func (a *Answer) check(isFit func() bool) Failure {
	switch {
	case a.Ending == EndedOtherwise:
		return PrefillBroken
	case len(a.Params) == 0:
		return PrefillNoParams
	case !isFit(), a.RemoteTokens >= 0 && a.RemoteTokens < a.PromptTokens:
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
		default:
			a.readCount(key, raw)
		}
		return nil
	})
	return err == nil && seen == flag|blocks|engine|request|host|port && !wrongMode
}

// readCount reads a member of a prefill leg's parameters if it is a count.
func (a *Answer) readCount(key, raw []byte) {
	switch string(key) {
	case "remote_num_tokens":
		a.RemoteTokens = tokens(raw)
	case "remote_prefill_cached_tokens":
		if n := tokens(raw); n >= 0 {
			a.CachedTokens = n
		}
	}
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

// sim is the transfer of simulated engines. It has the fields of nixl; its parameters may hold other things,
// block names for instance. A pair of one simulated and one real engine must not exist: a block name ends a
// real decode engine, so nixl refuses such parameters. What the simulated decode engine refuses itself is
// left to it, so that tests meet its failures.
type sim struct{}

// simTraits have the lease of nixl.
var simTraits = Traits{
	Name: SimName, Order: dispatch.PrefillFirst, HasParams: true, Lease: dispatch.DefaultLease,
	TakesPlain: true, limits: true,
}

func (sim) Traits() *Traits { return &simTraits }

func (sim) Begin(_ *Request, id string, _ Peer, _ func(n uint64) uint64) (Attempt, error) {
	return Attempt{ID: id, prefill: []byte(producerParams)}, nil
}

func (sim) Check(a *Answer) Failure { return a.check(a.readSim) }

// readSim reads the counts of a simulated engine's parameters, and reports whether they are those of a
// prefill leg whose blocks are kept. Block ids may be numbers or words, and other fields may have any name
// and type: they reach the decode rank as they are.
func (a *Answer) readSim() bool {
	isKept := false
	err := openai.Members(a.Params, func(key []byte, _, v openai.Span) error {
		raw := a.Params[v.Start:v.End]
		if string(key) == "do_remote_prefill" {
			isKept = raw[0] == 't'
		}
		a.readCount(key, raw)
		return nil
	})
	return err == nil && isKept
}

// nixlPush is vLLM's NixlPushConnector: the decode leg is sent first and registers at the prefill engine,
// which writes the blocks. The engines find each other's request by the X-Request-Id of both legs. A decode
// engine waits without an end for a prefill leg that never comes, so the caller has its own deadline.
type nixlPush struct{}

var pushTraits = Traits{
	Name: NixlPushName, Order: dispatch.DecodeFirst, FreshRequestID: true, TakesPlain: true,
	limits: true,
}

func (nixlPush) Traits() *Traits { return &pushTraits }

// Begin implements Transfer. Every key is written: the engine ends if one is missing.
func (nixlPush) Begin(_ *Request, id string, p Peer, _ func(n uint64) uint64) (Attempt, error) {
	switch {
	case id == "":
		return Attempt{}, incomplete(NixlPushName, "request id")
	case p.EngineID == "":
		return Attempt{}, incomplete(NixlPushName, "engine_id")
	case p.Host == "" || p.Port <= 0 || p.Port > maxPort:
		return Attempt{}, incomplete(NixlPushName, "side_channel")
	case p.TPSize <= 0 || p.PPSize <= 0:
		return Attempt{}, incomplete(NixlPushName, "tp_size and pp_size")
	}
	decode := kvParams + `{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":` +
		quoted(p.EngineID) + `,"remote_host":` + quoted(p.Host) + `,"remote_port":` + strconv.Itoa(p.Port) +
		`,"tp_size":` + strconv.Itoa(p.TPSize) + `,"pp_size":` + strconv.Itoa(p.PPSize) +
		`,"remote_request_id":` + quoted(id) + `}`
	return Attempt{ID: id, prefill: []byte(producerParams), decode: []byte(decode)}, nil
}

// Check implements Transfer. The parameters of the answer are of no use to the decode leg, which already has
// its own; that they are absent shows that the engine pushes nothing.
func (nixlPush) Check(a *Answer) Failure { return a.check(func() bool { return true }) }

// maxPort is the highest TCP port.
const maxPort = 1<<16 - 1

// PeerOfAnswer reads from the parameters of an earlier answer of a prefill rank what the next attempt's Begin
// needs of it. ok is false for parameters of another transfer.
func PeerOfAnswer(params []byte) (p Peer, ok bool) {
	var in struct {
		EngineID string `json:"remote_engine_id"`
		Host     string `json:"remote_host"`
		Port     int    `json:"remote_port"`
		TPSize   int    `json:"tp_size"`
		PPSize   int    `json:"pp_size"`
		Mode     string `json:"transfer_mode"`
	}
	if len(params) > MaxAnswer || json.Unmarshal(params, &in) != nil || in.Mode != "push" {
		return Peer{}, false
	}
	p = Peer{EngineID: in.EngineID, Host: in.Host, Port: in.Port, TPSize: in.TPSize, PPSize: in.PPSize}
	ok = p.EngineID != "" && p.Host != "" && p.Port > 0 && p.Port <= maxPort && p.TPSize > 0 && p.PPSize > 0
	return p, ok
}
