//go:build !linux

package pdproxy

import "time"

// asleep is how long the machine has slept. Whether other systems count that in their time depends on them.
func asleep() time.Duration { return 0 }
