package remote

import "time"

// DataTimers are the times of a data port. A zero field means its default.
type DataTimers struct {
	Admit      time.Duration // for a DPServer's answer; a later one counts as overloaded
	LateTicket time.Duration // for the ticket of a request that has ended, to give it back
	Body       time.Duration // for a request's body to arrive, and one second more for each MiB
	// for one write; longer than an ingress gives its clients, so that the ingress names the cause
	Stuck     time.Duration
	Dial      time.Duration // for a connection to an engine
	IdleOwned time.Duration // idle connections to engines that dpserve started
	// idle connections to other engines: vLLM's HTTP server closes them after 5 s
	IdleAttached time.Duration
}

// Defaults of DataTimers.
const (
	defaultDataAdmit        = 5 * time.Second
	defaultDataLateTicket   = 10 * time.Second
	defaultDataBody         = 30 * time.Second
	defaultDataStuck        = 90 * time.Second
	defaultDataDial         = 5 * time.Second
	defaultDataIdleOwned    = 100 * time.Second
	defaultDataIdleAttached = 4 * time.Second
)

// Limits of a data port that cannot be configured.
const (
	// bytes of a request's body, of which an ingress takes 64 MiB, with its hashes; more is 413
	maxDataBody     = 80 << 20
	maxKeptBody     = 1 << 20  // bytes of a buffer; larger ones are left to the garbage collector
	smallBody       = 16 << 10 // bytes; smaller buffers are always kept
	maxKeptBlocks   = 1 << 14  // entries
	relayBuffer     = 32 << 10 // bytes of a relay's buffer: one read of the engine is one write
	firstBodyBuffer = 4 << 10  // bytes of the buffer for a body whose length is not announced
)

func (t DataTimers) withDefaults() DataTimers {
	for _, d := range []struct {
		at    *time.Duration
		value time.Duration
	}{
		{&t.Admit, defaultDataAdmit},
		{&t.LateTicket, defaultDataLateTicket},
		{&t.Body, defaultDataBody},
		{&t.Stuck, defaultDataStuck},
		{&t.Dial, defaultDataDial},
		{&t.IdleOwned, defaultDataIdleOwned},
		{&t.IdleAttached, defaultDataIdleAttached},
	} {
		if *d.at <= 0 {
			*d.at = d.value
		}
	}
	return t
}
