package remote

import "time"

// DataTimers are those of a data port. A zero field means its default.
type DataTimers struct {
	Admit        time.Duration // for a DPServer's answer; longer counts as overloaded
	LateTicket   time.Duration // how long a given-up admission is waited for, to hand its ticket back
	Body         time.Duration // for a request's body to arrive, and a second more for each MiB
	Stuck        time.Duration // for one write; longer than an ingress lets its clients, so that it names the cause
	Dial         time.Duration // for a connection to an engine
	IdleOwned    time.Duration // idle connections to engines that dpserve started
	IdleAttached time.Duration // idle connections to other engines: vLLM closes at 5 s (ENGINES 3.6)
}

// Defaults of DataTimers.
const (
	DefaultDataAdmit        = 5 * time.Second
	DefaultDataLateTicket   = 10 * time.Second
	DefaultDataBody         = 30 * time.Second
	DefaultDataStuck        = 90 * time.Second
	DefaultDataDial         = 5 * time.Second
	DefaultDataIdleOwned    = 100 * time.Second
	DefaultDataIdleAttached = 4 * time.Second
)

// Numbers of a data port without a knob.
const (
	maxDataBody   = 80 << 20 // bytes of a request's body, of which an ingress takes 64 MiB, with its hashes; more is 413
	keptDataBody  = 1 << 20  // larger buffers are left to the garbage collector
	smallDataBody = 16 << 10 // smaller ones are kept whatever they were used for
	keptBlocks    = 1 << 14  // entries
	dataRelay     = 32 << 10 // bytes of a relay's buffer: one read of the engine is one write
	firstDataBody = 4 << 10  // bytes of the buffer for a body whose length is not announced
)

func (t DataTimers) withDefaults() DataTimers {
	for _, d := range []struct {
		at    *time.Duration
		value time.Duration
	}{
		{&t.Admit, DefaultDataAdmit},
		{&t.LateTicket, DefaultDataLateTicket},
		{&t.Body, DefaultDataBody},
		{&t.Stuck, DefaultDataStuck},
		{&t.Dial, DefaultDataDial},
		{&t.IdleOwned, DefaultDataIdleOwned},
		{&t.IdleAttached, DefaultDataIdleAttached},
	} {
		if *d.at <= 0 {
			*d.at = d.value
		}
	}
	return t
}
