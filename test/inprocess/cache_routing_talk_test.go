package inprocess

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/test/harness"
)

func envInt(k string, d int) int {
	if v, err := strconv.Atoi(os.Getenv(k)); err == nil {
		return v
	}
	return d
}

func TestXExperiment(t *testing.T) {
	opening, question := envInt("OP", 1000), envInt("QU", 1000)
	sessions := envInt("SE", 200)
	seed := uint64(envInt("SEED", 1))
	think := time.Duration(envInt("TH", 2000)) * time.Millisecond
	args := os.Getenv("ARGS")
	work := opening + (rt7Turns-1)*question
	gap := time.Duration(work) * rt7Token * 10 / 6 / rt7Ranks
	for _, routing := range strings.Split(os.Getenv("POL"), ";") {
		t.Run(routing, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t)
				c.Deploy(simApp("a", rt7Ranks, "independent", args, "routing: "+routing))
				c.WaitStatus("a", "RUNNING")
				var s conversations
				var overload sync.WaitGroup
				r, stop := rand.New(rand.NewPCG(seed, 70)), make(chan struct{})
				began := time.Now()
				arrive(r, sessions, gap, func(i int) {
					if i == sessions/2 && os.Getenv("CALM") == "" {
						s.mu.Lock()
						s.hot = true
						s.mu.Unlock()
						overload.Go(func() { overloadRank(t, c, "0/1", stop) })
					}
					r := rand.New(rand.NewPCG(seed, uint64(1000+i)))
					prompt, home := freshPrompt(r, opening), ""
					for range rt7Turns {
						a := idPrompt{Model: "a", Prompt: prompt, MaxTokens: rt7Output, ReturnIDs: true}.ask(t.Context(), c)
						if !assert.True(t, a.ok(), a) {
							return
						}
						s.note(a, home, "0/1")
						home = a.rank
						prompt = append(append(prompt, a.ids...), freshPrompt(r, question)...)
						time.Sleep(time.Duration((0.5 + r.Float64()) * float64(think)))
					}
				})
				close(stop)
				overload.Wait()
				fmt.Printf("RES %s seed %d: calm %.1f%% of %d stay, hit %.3f; hot: %.1f%% stay, %d of %d leave it, hit %.3f; took %s fake\n", routing, seed,
					100*s.calm.stay(), s.calm.stayed+s.calm.left, s.calm.hitRate(), 100*s.after.stay(), s.away.left, s.away.left+s.away.stayed, s.after.hitRate(), time.Since(began).Round(time.Second))
				c.Quiet()
			})
		})
	}
}
