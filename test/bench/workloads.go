//go:build linux

package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/dpserve/dpserve/test/tracesim"
)

// workload returns the requests of one round, in the order of time.
type workload func(load float64, seed uint64) []tracesim.Request

// generator is a workload that needs no file.
type generator struct {
	name string
	what string
	load string // what -load is
	make workload
}

const (
	agentSessions                = 1500
	chatRequests                 = 6000
	uniformPrompt, uniformOutput = 2048, 150
	uniformSpan                  = 5 * time.Minute
	burstCount, burstSize        = 10, 512
	burstShared                  = 4 // blocks
)

func generatedWorkloads() []generator {
	bursts := func(shared int) workload {
		return func(load float64, seed uint64) []tracesim.Request {
			return tracesim.Bursts(burstCount, int(burstSize*load), shared, seed)
		}
	}
	return []generator{
		{
			"agents", fmt.Sprintf("%d sessions; each turn begins with all turns before it, "+
				"behind one of 20 system prompts", agentSessions),
			"sessions per second",
			func(load float64, seed uint64) []tracesim.Request {
				return tracesim.Agents(agentSessions, load, seed)
			},
		},
		{
			"chats", fmt.Sprintf("%d requests as long as conversations are, "+
				"every fourth begins like one before it", chatRequests),
			"requests per second",
			func(load float64, seed uint64) []tracesim.Request {
				return tracesim.Chats(chatRequests, load, seed)
			},
		},
		{
			"uniform", fmt.Sprintf("%.0f minutes of prompts of %d tokens that share nothing",
				uniformSpan.Minutes(), uniformPrompt),
			"requests per second",
			func(load float64, seed uint64) []tracesim.Request {
				return tracesim.Uniform(int(load*uniformSpan.Seconds()), uniformPrompt, uniformOutput, load,
					seed)
			},
		},
		{
			"bursts", fmt.Sprintf("%d bursts of %d requests at one instant "+
				"behind a shared prompt of %d tokens",
				burstCount, burstSize, burstShared*tracesim.BlockSize),
			"a factor on a burst's size", bursts(burstShared),
		},
		{"bursts-cold", "the same without the shared prompt", "a factor on a burst's size", bursts(0)},
	}
}

// listWorkloads says what the role trace can play.
func listWorkloads(out io.Writer) {
	fmt.Fprintln(out, "-trace FILE plays a trace of Mooncake's format, or an Azure LLM inference trace; "+
		"-load: a factor on its rate.")
	fmt.Fprintln(out, "-trace NAME plays a generated workload:")
	for _, g := range generatedWorkloads() {
		fmt.Fprintf(out, "  %-13s%s; -load: %s\n", g.name, g.what, g.load)
	}
}

// openWorkload finds a generated workload, or reads a file. most bounds the requests; 0 = all.
func openWorkload(name string, most int) (workload, error) {
	for _, g := range generatedWorkloads() {
		if g.name == name {
			return func(load float64, seed uint64) []tracesim.Request {
				work := g.make(load, seed)
				if most > 0 {
					work = work[:min(most, len(work))]
				}
				return work
			}, nil
		}
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	trace, err := tracesim.ReadTrace(f, most)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return func(load float64, seed uint64) []tracesim.Request { return tracesim.Play(trace, load, seed) }, nil
}
