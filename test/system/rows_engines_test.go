package system

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// RG5: one rank of eight is killed under 64 streams; a second group of eight serves on. Within a second no
// router has a rank of the first group, none of its seven siblings gets a request until the group is back
// with the next epoch, and the second group sees nothing of it.
func TestRG5KilledRankUnder64Streams(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(1), harness.MemberSlots(16), harness.RealTimers)
	c.Expect(harness.EngineFails, harness.StreamBreaks)
	m := c.All[0]
	m.Want(simApp("two", 8, "lockstep", "sim_step_ms: 50") + "    num_groups: 2\n")
	before := c.Running("two").Units
	require.Len(t, before, 2)
	require.Len(t, before[0].Ranks, 8)
	var first []string
	pid := 0
	for i := range before[0].Ranks {
		first = append(first, fmt.Sprintf("0/%d", before[0].Ranks[i].Rank))
		if before[0].Ranks[i].Rank == 5 {
			pid = before[0].Ranks[i].PID
		}
	}
	load := harness.StartStreams(t, "two", 64, 15, harness.HungAfter, m.HTTP)
	load.Reaches(64)
	killed := time.Now()
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	out, slowest := outAfter(c, killed, "two", first, ifForced, m)
	fenced := killed.Add(out[m.Name])
	within(t, "1 of 8 ranks killed under 64 streams, its group out of routing", time.Second/slack, out,
		slowest)
	st := c.WaitApp("two", "whole again", func(st *client.AppStatus) error {
		if st.Ready != 16 || st.Units[0].Epoch != before[0].Epoch+1 {
			return errStatus(st)
		}
		return nil
	})
	load.Reaches(32)
	y := load.End()
	assert.Zero(t, y.Refused+y.Cut+y.Hung, "what clients saw: %v", y)
	assert.Equal(t, before[1].Epoch, st.Units[1].Epoch)
	for i := range st.Units[1].Ranks {
		assert.Equal(t, before[1].Ranks[i].Incarnation, st.Units[1].Ranks[i].Incarnation)
	}
	siblings, others := 0, 0
	for _, a := range load.Answers(time.Time{}) { // the streams that were open at the kill too
		isFirst := strings.HasPrefix(a.Rank, "0/")
		if !isFirst {
			others++
			assert.True(t, a.OK(), "the other group: %s", &a)
		}
		if isFirst && a.Began.After(fenced) && a.Began.Add(a.First).Before(st.Units[0].Since) {
			siblings++
		}
	}
	assert.Zero(t, siblings, "requests to the fenced group")
	assert.Positive(t, others)
	t.Logf("NUMBER RG5: %d answers of the other group, no error; %d streams of the first one broke", others,
		y.Broken)
	c.AllQuiet()
}

// RG8: groups that start at once on one host, on real sockets: 10 of two ranks over two nodes, 100 under
// DPSERVE_ACCEPTANCE. No start has to be repeated because of a port, and no port is used twice.
func TestRG8GroupsStartAtOnce(t *testing.T) {
	t.Parallel()
	groups := 10
	if accepting() {
		groups = 100
	}
	c := harness.StartMembers(t, harness.Each(2), harness.MemberSlots(groups), harness.RealTimers)
	c.All[0].Want(simApp("many", 2, "lockstep", "sim_step_ms: 100") +
		fmt.Sprintf("    num_groups: %d\n    placement_group_strategy: SPREAD\n", groups))
	st := c.Running("many")
	assert.Equal(t, 2*groups, st.Ready)
	urls := map[string]bool{}
	for _, u := range st.Units {
		assert.Equal(t, [...]any{uint64(1), 0}, [...]any{u.Epoch, u.Restarts}, "%s: %s", u.Unit, u.Reason)
		require.Len(t, u.Ranks, 2)
		assert.NotEqual(t, u.Ranks[0].Node, u.Ranks[1].Node)
		urls[u.Ranks[0].URL], urls[u.Ranks[1].URL] = true, true
	}
	assert.Len(t, urls, 2*groups)
	answersAt(t, "many", c.All[0].HTTP)
}

// sharedEngine starts a simulated engine by hand with more flags, and returns its URL.
func sharedEngine(t *testing.T, flags ...string) string {
	t.Helper()
	addr := ports.TakeAddr(t)
	_, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	harness.Run(t, append([]string{
		"engine", "sim", "--host", "127.0.0.1", "--port", port, "--served-model-name", "edge",
		"--sim-step-ms", "1",
	}, flags...)...)
	waitHealthy(t, addr)
	return "http://" + addr
}

// finished is how many requests a rank's engine has ended, by its own account.
func finished(t *testing.T, url, label string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/metrics", nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	m := regexp.MustCompile(`vllm:request_success_total\{engine="` + label +
		`",finished_reason="length",[^}]*\} ([0-9.]+)`).FindSubmatch(page)
	require.NotNil(t, m, "%s", page)
	n, err := strconv.ParseFloat(string(m[1]), 64)
	require.NoError(t, err)
	return int(n)
}

// place is where a rank is: the URL of its front end, and its label in the metrics there.
type place struct{ url, label string }

// RG12: eight ranks behind front ends of three kinds: one for each rank; two for four ranks each that count
// their ranks from 0; two that take the numbers of the whole group. Each rank is reached by its number, by
// the engines' own count; a ninth is refused. 320 requests a rank under DPSERVE_ACCEPTANCE, else 40.
func TestRG12EveryRankIsReached(t *testing.T) {
	t.Parallel()
	each := 40
	if accepting() {
		each = 320
	}
	kinds := map[string]func() (ranks []string, at []place){
		"external": func() (ranks []string, at []place) {
			for range 8 {
				url := sharedEngine(t)
				ranks = append(ranks, fmt.Sprintf("{url: %q}", url))
				at = append(at, place{url, "0"})
			}
			return ranks, at
		},
		"local index": func() ([]string, []place) { return twoFrontEnds(t, 0) },
		"global index": func() ([]string, []place) {
			return twoFrontEnds(t, 4, "--sim-global-index")
		},
	}
	for name, start := range kinds {
		ranks, at := start()
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := harness.Start(t)
			r.Deploy("applications: [{name: edge, model: {id: edge}, data_parallel: {dp_size: 8, coupling: " +
				"lockstep}, engine: {kind: attach, family: vllm, ranks: [" + strings.Join(ranks, ", ") +
				"]}}]")
			r.WaitStatus("edge", "RUNNING")
			before := make([]int, len(at))
			for i, p := range at {
				before[i] = finished(t, p.url, p.label)
			}
			var wg sync.WaitGroup
			for rank := range at {
				wg.Go(func() {
					for range each {
						code, name, text := askRank(t, r, rank)
						assert.Equal(t, http.StatusOK, code, text)
						assert.Equal(t, strconv.Itoa(rank), name)
					}
				})
			}
			wg.Wait()
			for i, p := range at {
				assert.Equal(t, each, finished(t, p.url, p.label)-before[i], "rank %d", i)
			}
			code, _, text := askRank(t, r, 8)
			assert.Equal(t, http.StatusBadRequest, code)
			assert.Contains(t, text, "this application has no rank 0/8 (it has 0/0 to 0/7)")
			r.Quiet()
		})
	}
}

// twoFrontEnds starts two front ends of one group of eight. second is the index of the first rank of the
// second one.
func twoFrontEnds(t *testing.T, second int, flags ...string) (ranks []string, at []place) {
	t.Helper()
	for i, index := range []int{0, second} {
		url := sharedEngine(t, append(flags, "--sim-internal-lb", "4", "--sim-first-rank",
			strconv.Itoa(4*i))...)
		for k := range 4 {
			ranks = append(ranks, fmt.Sprintf("{url: %q, addressing: header, selector: %d}", url, index+k))
			at = append(at, place{url, strconv.Itoa(4*i + k)})
		}
	}
	return ranks, at
}

// askRank sends a request to a rank of group 0 by its number.
func askRank(t *testing.T, r *harness.Real, rank int) (code int, answered, text string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+r.HTTP+"/v1/completions",
		strings.NewReader(`{"model":"edge","prompt":"hi","max_tokens":1}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Dpserve-Rank", "0/"+strconv.Itoa(rank))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header.Get("X-Dpserve-Rank"), string(b) + errText(err)
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// errNotShown says that a status does not show something yet.
var errNotShown = errors.New("not shown")

// CC12: engines of two groups that load for three seconds, as processes. The status says what each engine is
// doing, and the application runs when all ranks have computed a token, without a failed start.
func TestCC12SlowStart(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	began := time.Now()
	r.Deploy(simApp("slow", 2, "lockstep", "sim_step_ms: 20, sim_startup_s: 3") + "    num_groups: 2\n")
	r.Eventually(func() error {
		st := r.App("slow")
		for _, u := range st.Units {
			for _, k := range u.Ranks {
				if !strings.HasPrefix(k.Progress, "loading weights ") {
					return fmt.Errorf("%w: rank %d/%d: %q", errNotShown, k.Group, k.Rank, k.Progress)
				}
			}
		}
		if st.Status != "DEPLOYING" || len(st.Units) != 2 {
			return fmt.Errorf("%w: %s", errNotShown, st.Status)
		}
		return nil
	}, "all four ranks load their weights")
	st := r.WaitStatus("slow", "RUNNING")
	assert.GreaterOrEqual(t, time.Since(began), 3*time.Second)
	for _, u := range st.Units {
		assert.Equal(t, [...]any{uint64(1), 0}, [...]any{u.Epoch, u.Restarts})
		for _, k := range u.Ranks {
			assert.Empty(t, k.Progress)
			assert.Positive(t, finished(t, k.URL, strconv.Itoa(k.Rank)), "rank %d/%d", k.Group, k.Rank)
		}
	}
	assert.True(t, r.StreamChat(t.Context(), "slow", "hi", 3).OK())
	r.Quiet()
}
