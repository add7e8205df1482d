package transfer

import "bytes"

// Failure is how a leg, or the step between the legs, ends if it does not end well. Its text is a label of
// metrics.
type Failure uint8

// The closed list of failures.
const (
	NoFailure Failure = iota
	// PrefillNotDialed: no byte of the prefill leg was sent.
	PrefillNotDialed
	// PrefillRejected: the prefill engine answered 4xx. The decode engine would say the same.
	PrefillRejected
	// PrefillBroken: 5xx, a connection that ended, an abort, or an answer that is no answer.
	PrefillBroken
	// PrefillSilent: no answer within the caller's deadline.
	PrefillSilent
	// PrefillNoParams: the engine answered without parameters: it has no connector, or one of another kind.
	PrefillNoParams
	// PrefillUnfit: the engine's parameters would end a decode engine, or make it compute another prompt.
	PrefillUnfit
	// PrefillStopped: the leg ended by a stop, and this transfer keeps the blocks of none but a full length.
	PrefillStopped
	// PrefillFenced: the prefill engine ended between its answer and the decode leg.
	PrefillFenced
	// ParamsLate: the lease is over, or nearly.
	ParamsLate
	// DecodeNotDialed: no byte of the decode leg was sent.
	DecodeNotDialed
	// DecodeRejected: the decode engine answered 4xx, or an error event with such a code.
	DecodeRejected
	// DecodeFailed: 5xx, or an error event as the first event.
	DecodeFailed
	// DecodeDead: the decode engine says that its core is gone.
	DecodeDead
	// DecodeCut: the connection ended before the first event.
	DecodeCut
	// DecodeSilent: no first event within the caller's deadline.
	DecodeSilent
	// DecodeLostPrefill: the decode engine says that the prefill engine or its bootstrap server is gone.
	DecodeLostPrefill
	// DecodeNoBlocks: the decode engine says that the prefill engine failed to send.
	DecodeNoBlocks
	// ClientGone: the client left before the answer began.
	ClientGone
	numFailures
)

var failureNames = [numFailures]string{
	"", "prefill_not_dialed", "prefill_rejected", "prefill_broken", "prefill_silent", "prefill_no_params",
	"prefill_unfit", "prefill_stopped", "prefill_fenced", "params_late", "decode_not_dialed",
	"decode_rejected", "decode_failed", "decode_dead", "decode_cut", "decode_silent", "decode_lost_prefill",
	"decode_no_blocks", "client_gone",
}

func (f Failure) String() string { return failureNames[f] }

// Sides is a set of the two sides of a pair.
type Sides uint8

const (
	Nobody  Sides = 0
	Prefill Sides = 1
	Decode  Sides = 2
	Both          = Prefill | Decode
)

// Redo is what the caller does next, within its bounds on attempts. If they are used up, the application's
// fall-back decides.
type Redo uint8

const (
	// Nothing is left to do.
	Nothing Redo = iota
	// PassAnswer: the engine's answer goes to the client.
	PassAnswer
	// SameParams: another decode rank gets the parameters that were put back.
	SameParams
	// FreshPair: a new attempt from the prefill on; both ranks may be the same.
	FreshPair
	// OtherPrefill: a new attempt on another prefill rank; the decode rank may be the same.
	OtherPrefill
	// OtherDecode: a new attempt from the prefill on, with another decode rank.
	OtherDecode
	// DecodeAlone: the decode rank computes the prompt itself, without parameters.
	DecodeAlone
)

// Verdict is what a failure means. Whatever it is, a leg of the other side that still runs is cancelled at
// once: waiting for it takes minutes, because engines learn late or never that the other side has failed.
type Verdict struct {
	Charge     Sides // whose count of failures grows
	Probe      Sides // whose health is asked before it gets another pair
	Redo       Redo
	ParamsDead bool // what was not taken yet must be discarded; what was taken is never put back
}

// pullVerdicts are for transfers whose decode leg carries the prefill's parameters. All errors of vLLM's
// decode engine read "Internal server error", so they are taken for a failed transfer and charge no side.
var pullVerdicts = [numFailures]Verdict{
	PrefillNotDialed:  {Charge: Prefill, Redo: OtherPrefill},
	PrefillRejected:   {Redo: PassAnswer, ParamsDead: true},
	PrefillBroken:     {Charge: Prefill, Redo: OtherPrefill, ParamsDead: true},
	PrefillSilent:     {Charge: Prefill, Probe: Prefill, Redo: OtherPrefill, ParamsDead: true},
	PrefillNoParams:   {Redo: DecodeAlone, ParamsDead: true},
	PrefillUnfit:      {Redo: DecodeAlone, ParamsDead: true},
	PrefillStopped:    {Redo: DecodeAlone, ParamsDead: true},
	PrefillFenced:     {Redo: OtherPrefill, ParamsDead: true},
	ParamsLate:        {Redo: FreshPair, ParamsDead: true},
	DecodeNotDialed:   {Charge: Decode, Redo: SameParams},
	DecodeRejected:    {Redo: PassAnswer, ParamsDead: true},
	DecodeFailed:      {Probe: Both, Redo: FreshPair, ParamsDead: true},
	DecodeDead:        {Charge: Decode, Probe: Decode, Redo: OtherDecode, ParamsDead: true},
	DecodeCut:         {Charge: Decode, Probe: Decode, Redo: OtherDecode, ParamsDead: true},
	DecodeSilent:      {Probe: Both, Redo: FreshPair, ParamsDead: true},
	DecodeLostPrefill: {Charge: Prefill, Probe: Prefill, Redo: OtherPrefill, ParamsDead: true},
	DecodeNoBlocks:    {Charge: Prefill, Redo: OtherPrefill, ParamsDead: true},
	ClientGone:        {Redo: Nothing, ParamsDead: true},
}

// pushVerdicts are for transfers without parameters to keep: a decode leg that was not dialed leaves a
// prefill leg that sends to nobody, so both start again.
var pushVerdicts = overrule(pullVerdicts, map[Failure]Verdict{
	DecodeNotDialed: {Charge: Decode, Redo: OtherDecode, ParamsDead: true},
})

// sglangVerdicts never let a decode rank compute a prompt: its engine refuses a request without a room.
var sglangVerdicts = overrule(pushVerdicts, map[Failure]Verdict{
	PrefillNoParams: {Redo: OtherPrefill, ParamsDead: true},
	PrefillUnfit:    {Redo: OtherPrefill, ParamsDead: true},
	PrefillStopped:  {Redo: OtherPrefill, ParamsDead: true},
})

func overrule(base [numFailures]Verdict, by map[Failure]Verdict) [numFailures]Verdict {
	for f, v := range by {
		base[f] = v
	}
	return base
}

// ReadDecodeFailure classifies what a decode leg answered before anything went to the client: an answer of
// another status than 200, or an error event as the first one, with the status in it. text is the engine's
// message; isDead says that it is the message of an engine whose core is gone.
func ReadDecodeFailure(t Transfer, status int, text []byte, isDead bool) Failure {
	switch {
	case isDead:
		return DecodeDead
	case status >= 400 && status < 500:
		return DecodeRejected
	case t.Traits().Name != SGLangName:
		return DecodeFailed
	case bytes.Contains(text, []byte("Could not fetch bootstrap info")),
		bytes.Contains(text, []byte("Lost connection with prefill instance")):
		return DecodeLostPrefill
	case bytes.Contains(text, []byte("Failed to get kvcache from prefill instance")):
		return DecodeNoBlocks
	}
	return DecodeFailed
}
