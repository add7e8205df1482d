package dpserver

import "time"

// Timers are the times of a DPServer; the zero value of a field means its default. The period of the health
// probe and the stall timeout are settings of the application.
type Timers struct {
	Canary time.Duration // deadline of a canary
	// from the end of an admission's context to the end of its ticket, if no Done came
	TicketLapse  time.Duration
	BusyHold     time.Duration // how long an engine_busy answer keeps a rank full at most
	TripBackoff  time.Duration // before the first canary of a tripped rank; each later wait doubles
	TripCeiling  time.Duration // the longest such wait
	CounterLimit time.Duration // deadline of one read of /metrics
	Scrape       time.Duration // between two reads, while something needs their values
	// events count as silent when requests have ended for that long without an event
	Silence time.Duration
}

// Defaults of Timers, and of the health settings of an application.
const (
	defaultCanary        = 10 * time.Second
	defaultTicketLapse   = 5 * time.Second
	defaultBusyHold      = time.Second
	defaultTripBackoff   = time.Second
	defaultTripCeiling   = 64 * time.Second
	defaultCounterLimit  = 500 * time.Millisecond
	defaultScrape        = time.Second
	defaultSilence       = 30 * time.Second
	defaultHealthPeriod  = time.Second
	defaultHealthTimeout = 5 * time.Second
	defaultStallTimeout  = 20 * time.Second
)

// Counts of the trip and of the stall check.
const (
	tripAfter   = 5 // failures in a row that stop admission
	fenceAfter  = 3 // failed canaries in a row that fence an owned engine
	stallFactor = 3 // the stall timeout is at least this times the predicted prefill in front
)

func (t Timers) withDefaults() Timers {
	setDefault(&t.Canary, defaultCanary)
	setDefault(&t.TicketLapse, defaultTicketLapse)
	setDefault(&t.BusyHold, defaultBusyHold)
	setDefault(&t.TripBackoff, defaultTripBackoff)
	setDefault(&t.TripCeiling, defaultTripCeiling)
	setDefault(&t.CounterLimit, defaultCounterLimit)
	setDefault(&t.Scrape, defaultScrape)
	setDefault(&t.Silence, defaultSilence)
	return t
}

func setDefault(d *time.Duration, value time.Duration) {
	if *d <= 0 {
		*d = value
	}
}
