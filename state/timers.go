package state

import "time"

// Bounds and waits of the unit state machine.
const (
	// MaxStartAttempts is how many starts in a row may fail before the unit is failed.
	MaxStartAttempts = 3
	// DefaultStartRetry is the wait after the first failed start; it doubles: 1 s, 2 s.
	DefaultStartRetry = time.Second
	// DefaultRestartMin is the wait before the first restart after ready; it doubles up to DefaultRestartMax.
	DefaultRestartMin = time.Second
	// DefaultRestartMax is the longest wait before a restart.
	DefaultRestartMax = 64 * time.Second
	// DefaultRestartReset is how long a unit must have been ready for its restarts to count from one again.
	DefaultRestartReset = 10 * time.Minute
	// DefaultResend is the silence of a node after which the controller sends an order again.
	DefaultResend = 2 * time.Second
)

// Timers are the waits of the unit state machine. Zero fields mean the defaults.
type Timers struct {
	StartRetry   time.Duration // after a failed start, doubled per attempt
	RestartMin   time.Duration // after a failure of a ready unit, doubled per failure
	RestartMax   time.Duration // upper bound of both
	RestartReset time.Duration // a unit that was ready for this long counts its failures from one again
	Resend       time.Duration // after this silence of a node an order is sent again
}

// WithDefaults replaces zero fields by the defaults.
func (t Timers) WithDefaults() Timers {
	return Timers{
		StartRetry:   orDefault(t.StartRetry, DefaultStartRetry),
		RestartMin:   orDefault(t.RestartMin, DefaultRestartMin),
		RestartMax:   orDefault(t.RestartMax, DefaultRestartMax),
		RestartReset: orDefault(t.RestartReset, DefaultRestartReset),
		Resend:       orDefault(t.Resend, DefaultResend),
	}
}

func orDefault(d, def time.Duration) time.Duration {
	if d > 0 {
		return d
	}
	return def
}

// startDelay is StartRetry * 2^(attempt-1).
func (t Timers) startDelay(attempt int) time.Duration {
	return doubleDelay(t.StartRetry, attempt, t.RestartMax)
}

// restartDelay is min(RestartMin * 2^(failures-1), RestartMax).
func (t Timers) restartDelay(failures int) time.Duration {
	return doubleDelay(t.RestartMin, failures, t.RestartMax)
}

func doubleDelay(d time.Duration, n int, limit time.Duration) time.Duration {
	for ; n > 1 && d < limit; n-- {
		d *= 2
	}
	return min(d, limit)
}
