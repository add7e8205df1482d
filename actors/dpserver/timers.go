package dpserver

import "time"

// Timers of a DPServer; the zero value of a field means its default. Periods of the health probe and the stall timeout are
// the application's.
type Timers struct {
	Canary       time.Duration // deadline of a canary
	TicketLapse  time.Duration // from the end of an admission's context to the ticket's end, if no Done came
	BusyHold     time.Duration // how long an engine_busy answer keeps a rank full at most
	TripBackoff  time.Duration // before the first canary of a tripped rank; doubles
	TripCeiling  time.Duration // longest such wait
	CounterLimit time.Duration // deadline of one look at /metrics
	Scrape       time.Duration // between two such looks, while somebody reads what they say
	Silence      time.Duration // requests complete that long without a kv event: the events are silent
}

// Defaults (CONTRACTS sections 2, 7 and 9).
const (
	DefaultCanary        = 10 * time.Second
	DefaultTicketLapse   = 5 * time.Second
	DefaultBusyHold      = time.Second
	DefaultTripBackoff   = time.Second
	DefaultTripCeiling   = 64 * time.Second
	DefaultCounterLimit  = 500 * time.Millisecond
	DefaultScrape        = time.Second
	DefaultSilence       = 30 * time.Second
	DefaultHealthPeriod  = time.Second
	DefaultHealthTimeout = 5 * time.Second
	DefaultStallTimeout  = 20 * time.Second
)

// Counts of the trip.
const (
	tripAfter   = 5 // failures in a row that stop admission
	fenceAfter  = 3 // failed canaries in a row that fence an owned engine
	stallFactor = 3 // the stall timeout is at least this times the predicted prefill in front
)

func (t Timers) withDefaults() Timers {
	def(&t.Canary, DefaultCanary)
	def(&t.TicketLapse, DefaultTicketLapse)
	def(&t.BusyHold, DefaultBusyHold)
	def(&t.TripBackoff, DefaultTripBackoff)
	def(&t.TripCeiling, DefaultTripCeiling)
	def(&t.CounterLimit, DefaultCounterLimit)
	def(&t.Scrape, DefaultScrape)
	def(&t.Silence, DefaultSilence)
	return t
}

func def(d *time.Duration, value time.Duration) {
	if *d <= 0 {
		*d = value
	}
}
