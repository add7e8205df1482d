package msg

import "github.com/dpserve/dpserve/client"

// The admin API's JSON types live in client. These names are for the packages that still use them from here.
type (
	AppStatus   = client.AppStatus
	UnitStatus  = client.UnitStatus
	RankStatus  = client.RankStatus
	KVStatus    = client.KVStatus
	EventStatus = client.EventStatus
	IndexStatus = client.Index
	NodeStatus  = client.NodeStatus

	Plan     = client.Plan
	AppPlan  = client.AppPlan
	UnitPlan = client.UnitPlan
	SeatPlan = client.SeatPlan
	NodePlan = client.NodePlan

	RouteQuery      = client.Query
	RouterOverride  = client.Override
	Explanation     = client.Explanation
	RankExplanation = client.RankExplanation
	Term            = client.Term
	Replay          = client.Replay
	RouterInfo      = client.Info
	Law             = client.Law
	RankSpeed       = client.WorkerSpeed
	ResetResult     = client.ResetResult

	BestWorker    = client.BestWorkerRequest
	Worker        = client.Worker
	PotentialLoad = client.PotentialLoad
	KVRun         = client.Run
	Generated     = client.Part
	TokenUsage    = client.Usage
)

// Unreachable is the phase of units and ranks on a node that does not answer.
const Unreachable = client.Unreachable

// States of a rank's KV events.
const (
	EventsConnecting = client.EventsConnecting
	EventsWaiting    = client.EventsWaiting
	EventsLive       = client.EventsLive
	EventsPartial    = client.EventsPartial
	EventsSilent     = client.EventsSilent
)
