package transfer

import (
	"encoding/json"
	"strconv"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// nixlPush is vLLM's NixlPushConnector: the decode leg is sent first and registers at the prefill engine,
// which writes the blocks. The engines find each other's request by the X-Request-Id of both legs. A decode
// engine waits without an end for a prefill leg that never comes, so the caller has its own deadline.
type nixlPush struct{}

// pushTraits leave out /v1/responses: it makes up its request ids, so the two legs would never meet.
var pushTraits = Traits{
	Name: NixlPushName, Order: DecodeFirst, FreshRequestID: true, TakesPlain: true,
	routes: []Route{Completions, Chat, Messages, Generate}, limits: true,
}

// Traits implements Transfer.
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
	b := make([]byte, 0, 256)
	b = append(b, kvParams+`{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":`...)
	b = openai.AppendString(b, p.EngineID)
	b = append(b, `,"remote_host":`...)
	b = openai.AppendString(b, p.Host)
	b = append(b, `,"remote_port":`...)
	b = strconv.AppendInt(b, int64(p.Port), 10)
	b = append(b, `,"tp_size":`...)
	b = strconv.AppendInt(b, int64(p.TPSize), 10)
	b = append(b, `,"pp_size":`...)
	b = strconv.AppendInt(b, int64(p.PPSize), 10)
	b = append(b, `,"remote_request_id":`...)
	b = append(openai.AppendString(b, id), '}')
	return Attempt{ID: id, prefill: []byte(producerParams), decode: b}, nil
}

// Check implements Transfer. The parameters of the answer are of no use to the decode leg, which already has
// its own; that they are absent shows that the engine pushes nothing.
func (nixlPush) Check(a *Answer) Failure {
	switch {
	case a.Ending == EndedOtherwise:
		return PrefillBroken
	case len(a.Params) == 0:
		return PrefillNoParams
	}
	return NoFailure
}

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
