package system

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

const kvRouting = "    routing: {policy: scoring, identity: tokens, params: {profile: locality}}\n"

// kvPrompt is a prompt of n token ids; prompts of different numbers share no block.
func kvPrompt(number, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(1000 + (number*7919+i*31)%30000)
	}
	return out
}

// kvOn sends a prompt of token ids to a rank, whatever the policy says. A named rank is refused, not waited
// for, until the ingress knows it too, a moment after the controller says RUNNING.
func kvOn(r *harness.Real, app, worker string, ids []uint32) {
	r.T.Helper()
	body, err := json.Marshal(map[string]any{
		"token_ids": ids, "worker": worker,
		"sampling": map[string]any{"max_tokens": 2},
	})
	require.NoError(r.T, err)
	code, text := 0, ""
	r.Expect(harness.RankNotKnownYet)
	r.Eventually(func() error {
		if code, text = r.Do(http.MethodPost, "/api/v1/routers/"+app+"/generate",
			string(body)); code == http.StatusServiceUnavailable {
			return fmt.Errorf("%d %s", code, text)
		}
		return nil
	}, "the ingress knows "+app+"/"+worker)
	require.Equal(r.T, http.StatusOK, code, text)
	require.NotContains(r.T, text, "event: error")
}

// kvIndexed are the blocks in the index by "GROUP/RANK tier".
func kvIndexed(r *harness.Real, app string) map[string]int {
	r.T.Helper()
	code, text := r.Do(http.MethodGet, "/api/v1/routers/"+app+"/dump_events", "")
	require.Equal(r.T, http.StatusOK, code, text)
	var d struct{ Events []client.Run }
	require.NoError(r.T, json.Unmarshal([]byte(text), &d))
	out := map[string]int{}
	for _, e := range d.Events {
		out[e.Worker+" "+e.Tier] += len(e.Blocks)
	}
	return out
}

// kvLive waits until the events of all ranks are followed.
func kvLive(r *harness.Real, app string, ranks int) {
	r.T.Helper()
	r.Eventually(func() error {
		for i := range ranks {
			k, _ := r.Rank(app, 0, i)
			if k.KV == nil || k.KV.Events == nil || k.KV.Events.State != client.EventsLive {
				return fmt.Errorf("rank %d: %+v", i, k.KV)
			}
		}
		return nil
	}, "events of every rank")
}

// listening are the TCP ports that a process listens on, by /proc. All of its sockets are on loopback, UDP
// too.
func listening(t *testing.T, pid int) map[int]bool {
	t.Helper()
	inodes := map[string]bool{}
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	require.NoError(t, err)
	for _, f := range files {
		if l, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, f.Name())); err == nil &&
			strings.HasPrefix(l, "socket:[") {
			inodes[strings.TrimSuffix(strings.TrimPrefix(l, "socket:["), "]")] = true
		}
	}
	out := map[int]bool{}
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6", "/proc/net/udp", "/proc/net/udp6"} {
		b, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		for line := range strings.SplitSeq(string(b), "\n") {
			f := strings.Fields(line)
			tcp := strings.Contains(file, "tcp")
			if len(f) < 10 || !inodes[f[9]] || tcp && f[3] != "0A" {
				continue
			}
			assert.True(t, loopbackHex(f[1]), "process %d listens on %s of %s", pid, f[1], file)
			if !tcp {
				continue
			}
			_, text, _ := strings.Cut(f[1], ":")
			port, err := strconv.ParseInt(text, 16, 32)
			require.NoError(t, err)
			out[int(port)] = true
		}
	}
	return out
}

// loopbackHex reads the local address of /proc/net/tcp.
func loopbackHex(addr string) bool {
	host, _, _ := strings.Cut(addr, ":")
	var ip net.IP
	for i := 0; i+8 <= len(host); i += 8 {
		var b [4]byte
		if _, err := fmt.Sscanf(host[i:i+8], "%02x%02x%02x%02x", &b[3], &b[2], &b[1], &b[0]); err != nil {
			return false
		}
		ip = append(ip, b[:]...)
	}
	return ip.IsLoopback()
}

// SP1, SP12: every socket of a node and of the engines of a group of four is on loopback. What strangers
// write into those of the events changes nothing, and what one rank publishes is its own.
func TestSP12EventSockets(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	for what, bad := range map[string]string{
		"bind on every interface": `kv_events: {bind: "tcp://0.0.0.0:5557"}`,
		"another host's events":   `kv_events: {connect: "tcp://192.0.2.7:5557"}`,
	} {
		code, text := r.Do(http.MethodPost, "/api/v1/validate?file=app.yaml",
			"applications:\n  - name: x\n    model: {id: x}\n    engine:\n      kind: attach\n"+
				"      family: vllm\n      ranks:\n        - {url: \"http://192.0.2.1:8000\", "+bad+"}\n")
		assert.Equal(t, http.StatusBadRequest, code, "%s: %s", what, text)
		assert.Contains(t, text, "kv_events")
	}
	r.Deploy(simApp("a", 4, "lockstep", "sim_step_ms: 1") + kvRouting)
	st := r.WaitStatus("a", "RUNNING")
	kvLive(r, "a", 4)

	own := listening(t, r.PID)
	var events, replays []int
	for _, u := range st.Units {
		for _, k := range u.Ranks {
			for port := range listening(t, k.PID) {
				if !strings.HasSuffix(k.URL, ":"+strconv.Itoa(port)) {
					replays = append(replays, port)
				}
			}
		}
	}
	for port := range own {
		if addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port)); addr != r.HTTP && addr != r.Admin {
			events = append(events, port)
		}
	}
	assert.GreaterOrEqual(t, len(events), 4, "dpserve listens for the events of four ranks")
	assert.GreaterOrEqual(t, len(replays), 4, "four engines listen for replays")

	kvOn(r, "a", "0/2", kvPrompt(1, 640))
	want := map[string]int{"0/2 gpu": 40}
	r.Eventually(func() error {
		if got := kvIndexed(r, "a"); got["0/2 gpu"] != want["0/2 gpu"] ||
			got["0/0 gpu"]+got["0/1 gpu"]+got["0/3 gpu"] > 0 {
			return fmt.Errorf("%v", got)
		}
		return nil
	}, "the store is rank 2's alone")

	for _, port := range append(events, replays...) {
		abuse(t, port)
	}
	kvOn(r, "a", "0/1", kvPrompt(2, 320))
	r.Eventually(func() error {
		got := kvIndexed(r, "a")
		if got["0/1 gpu"] != 20 || got["0/2 gpu"] != 40 || got["0/0 gpu"]+got["0/3 gpu"] > 0 {
			return fmt.Errorf("%v", got)
		}
		return nil
	}, "events are followed as before")
	for i := range 4 {
		k, _ := r.Rank("a", 0, i)
		assert.Equal(t, "ready", k.Phase)
		assert.Equal(t, uint64(1), k.Epoch)
	}
	r.Quiet()
	t.Logf("SP12: %d event sockets of dpserve and %d of engines, all on loopback; index after abuse %v",
		len(events), len(replays), kvIndexed(r, "a"))
}

// abuse writes into a socket what no peer would, and leaves.
func abuse(t *testing.T, port int) {
	t.Helper()
	greeting := append(append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0}, "NULL"...),
		make([]byte, 48)...)
	for _, junk := range [][]byte{
		[]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		bytes.Repeat([]byte{0xff}, 1<<16),
		// a command of 2^63 bytes
		append(append([]byte{}, greeting...), 6, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff),
		greeting[:20],
	} {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", net.JoinHostPort("127.0.0.1",
			strconv.Itoa(port)))
		if err != nil {
			continue // a port of a meeting that is over
		}
		_ = c.SetDeadline(time.Now().Add(harness.Patience))
		_, _ = c.Write(junk) // it may hang up
		_ = c.Close()
	}
}
