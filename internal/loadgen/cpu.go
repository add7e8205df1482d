package loadgen

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
)

// clockTick is the unit of /proc/PID/stat: USER_HZ is 100 on every Linux that Go supports.
const clockTick = 10 * time.Millisecond

var errStat = errors.New("not a line of /proc/PID/stat")

// CPU is the processor time of the watched processes, without children, during a run and its warm-up.
type CPU struct {
	Seconds      float64 `json:"seconds"`
	Cores        float64 `json:"cores"`          // mean number of busy cores
	UsPerRequest float64 `json:"us_per_request"` // total time over all requests
	UsPerChunk   float64 `json:"us_per_chunk"`   // total time over all chunks; 0 without chunks
}

// String returns one line.
func (c *CPU) String() string {
	line := fmt.Sprintf("CPU %.2f s (%.2f cores), %.1f µs per request", c.Seconds, c.Cores, c.UsPerRequest)
	if c.UsPerChunk > 0 {
		line += fmt.Sprintf(", %.2f µs per chunk", c.UsPerChunk)
	}
	return line
}

// cpuReading is the processor time so far; ok is false if it could not be read.
type cpuReading struct {
	used time.Duration
	ok   bool
}

// chargeCPU divides the time between two readings by the work done; nil if a reading failed.
func chargeCPU(before, after cpuReading, wall time.Duration, done counts) *CPU {
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

// cpuTime returns the processor time of pids so far.
func cpuTime(pids []int) cpuReading {
	var sum time.Duration
	for _, pid := range pids {
		text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err != nil {
			return cpuReading{}
		}
		used, err := parseStat(text)
		if err != nil {
			return cpuReading{}
		}
		sum += used
	}
	return cpuReading{sum, len(pids) > 0}
}

// parseStat reads user and system time (fields 14 and 15) of a stat line. The command in field 2 may hold
// blanks and brackets, so fields count from the last closing bracket.
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
