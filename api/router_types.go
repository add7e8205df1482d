package api

import "github.com/dpserve/dpserve/actors/msg"

const pathRouters = "/api/v1/routers"

// Limits of the router's paths.
const (
	maxRouterBody = 17 << 20 // bytes: the largest inference body (16 MiB) and what stands around it
	maxTokenIDs   = 1 << 20  // ids of one prompt
	maxGenerates  = 256      // generate calls and dumps at one time
)

// ExplainReply answers POST /api/v1/routers/{app}/explain.
type ExplainReply struct {
	Envelope
	msg.Explanation
}

// ResetReply answers POST /api/v1/routers/{app}/reset.
type ResetReply struct {
	Envelope
	msg.ResetResult
}

// RouterReply answers GET /api/v1/routers/{app}.
type RouterReply struct {
	Envelope
	msg.RouterInfo
}

// WorkerReply answers POST /api/v1/routers/{app}/best_worker.
type WorkerReply struct {
	Envelope
	msg.Worker
}

// LoadsReply answers POST /api/v1/routers/{app}/potential_loads.
type LoadsReply struct {
	Envelope
	Loads []msg.PotentialLoad `json:"loads"` // by group and rank
}

// ReservationReply answers POST /api/v1/routers/{app}/mark_prefill_complete and /free.
type ReservationReply struct {
	Envelope
	RequestID string `json:"request_id"`
	Status    string `json:"status"` // prefill_complete | freed
}

// tokensRequest is the body of potential_loads.
type tokensRequest struct {
	TokenIDs []uint32 `json:"token_ids"`
}

// reservationRequest is the body of mark_prefill_complete and free.
type reservationRequest struct {
	RequestID string `json:"request_id"`
}
