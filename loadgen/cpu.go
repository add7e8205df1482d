package loadgen

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
)

// clockTick is the unit of /proc/PID/stat: USER_HZ is 100 on every Linux that Go runs on.
const clockTick = 10 * time.Millisecond

var errStat = errors.New("not a line of /proc/PID/stat")

// CPU is processor time of the watched processes, without children, over a run with its warm-up.
type CPU struct {
	Seconds      float64 `json:"seconds"`
	Cores        float64 `json:"cores"`          // mean number of busy cores
	UsPerRequest float64 `json:"us_per_request"` // all time over all requests
	UsPerChunk   float64 `json:"us_per_chunk"`   // all time over all chunks; 0 if there were none
}

// String is one line.
func (c *CPU) String() string {
	line := fmt.Sprintf("CPU %.2f s (%.2f cores), %.1f µs per request", c.Seconds, c.Cores, c.UsPerRequest)
	if c.UsPerChunk > 0 {
		line += fmt.Sprintf(", %.2f µs per chunk", c.UsPerChunk)
	}
	return line
}

// reading is processor time so far; not ok if there is nothing to read.
type reading struct {
	used time.Duration
	ok   bool
}

// charge divides the time between two readings over what was done; nil if one of them failed.
func charge(before, after reading, wall time.Duration, done counts) *CPU {
	used := after.used - before.used
	if !before.ok || !after.ok || used < 0 || wall <= 0 || done.requests == 0 {
		return nil
	}
	c := &CPU{Seconds: used.Seconds(), Cores: used.Seconds() / wall.Seconds()}
	c.UsPerRequest = float64(used.Microseconds()) / float64(done.requests)
	if done.chunks > 0 {
		c.UsPerChunk = float64(used.Microseconds()) / float64(done.chunks)
	}
	return c
}

// cpuTime is the processor time of pids so far.
func cpuTime(pids []int) reading {
	var sum time.Duration
	for _, pid := range pids {
		text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err != nil {
			return reading{}
		}
		used, err := parseStat(text)
		if err != nil {
			return reading{}
		}
		sum += used
	}
	return reading{sum, len(pids) > 0}
}

// parseStat reads user and system time (fields 14 and 15) of a stat line. The command in field 2 may hold blanks and
// brackets, so fields count from the last closing bracket.
func parseStat(text []byte) (time.Duration, error) {
	const user, system = 11, 12 // behind the command
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(fields) <= system {
		return 0, errStat
	}
	u, err := strconv.ParseUint(string(fields[user]), 10, 48)
	if err != nil {
		return 0, errStat
	}
	s, err := strconv.ParseUint(string(fields[system]), 10, 48)
	if err != nil {
		return 0, errStat
	}
	return time.Duration(u+s) * clockTick, nil
}
