package pairengine

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// run is a prefill and a decode stub, and requests to them without dpserve.
type run struct {
	t      *testing.T
	f      *Fleet
	tr     transfer.Transfer
	q      transfer.Request
	number int
}

func newRun(t *testing.T, name, body string) *run {
	t.Helper()
	r := &run{t: t, f: New(t, name, "pd")}
	r.tr, _ = transfer.Named(name)
	require.NoError(t, r.q.Scan(r.tr, transfer.Chat, []byte(body)))
	require.Equal(t, transfer.CanSplit, r.q.Reason)
	r.f.Add(Prefill, ports.TakeAddr(t), 1)
	r.f.Add(Decode, ports.TakeAddr(t), 1)
	return r
}

// attempt makes the fields of both legs.
func (r *run) attempt() transfer.Attempt {
	r.t.Helper()
	p := r.f.engines[0]
	peer := transfer.Peer{EngineID: p.Name, Host: "127.0.0.1", Port: 5600, TPSize: 1, PPSize: 1}
	if boot, ok := r.tr.(transfer.Bootstrapper); ok {
		query, err := boot.Query("http://" + p.Addr)
		require.NoError(r.t, err)
		status, text := r.send(http.MethodGet, query.URL, nil, "")
		peer, err = boot.ReadPeer("http://"+p.Addr, 0, status, []byte(text))
		require.NoError(r.t, err)
	}
	r.number++
	a, err := r.tr.Begin(&r.q, fmt.Sprintf("attempt-%d", r.number), peer,
		func(n uint64) uint64 { return uint64(r.number) % n })
	require.NoError(r.t, err)
	return a
}

func (r *run) send(method, url string, body []byte, id string) (status int, text string) {
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	req.Header.Set("X-Request-Id", id)
	req.Close = true // a later engine may listen on the same port
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	var out bytes.Buffer
	_, _ = out.ReadFrom(resp.Body)
	return resp.StatusCode, out.String()
}

func (r *run) leg(side int, body []byte, id string) (status int, text string) {
	return r.send(http.MethodPost, "http://"+r.f.engines[side].Addr+transfer.Chat.Path(), body, id)
}

// both sends both legs as the transfer wants it, and returns the decode leg's answer.
func (r *run) both(a transfer.Attempt) (status int, text string) {
	if !r.f.isPull() {
		done := make(chan struct{})
		go func() {
			defer close(done)
			r.leg(0, a.AppendPrefill(nil, &r.q), a.ID)
		}()
		status, text = r.leg(1, a.AppendDecode(nil, &r.q, nil), a.ID)
		<-done
		return status, text
	}
	return r.leg(1, a.AppendDecode(nil, &r.q, r.params(a)), a.ID)
}

// params are those of a prefill leg, as members of a body.
func (r *run) params(a transfer.Attempt) []byte {
	r.t.Helper()
	_, text := r.leg(0, a.AppendPrefill(nil, &r.q), a.ID)
	answer, failure := transfer.ReadPrefill(r.tr, &r.q, []byte(text))
	require.Equal(r.t, transfer.NoFailure, failure, text)
	return append([]byte(`"kv_transfer_params":`), answer.Params...)
}

// TestEnginesTakeTheLegsOfEveryTransfer: the legs that package transfer makes are without a fault, and
// the text is that of one engine.
func TestEnginesTakeTheLegsOfEveryTransfer(t *testing.T) {
	body := harness.Chat("pd", Mark+" there was a fox", 6, false)
	for _, name := range []string{"nixl", "nixl-push", "mooncake", "sglang", "sim"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRun(t, name, body)
			for range 3 {
				status, text := r.both(r.attempt())
				require.Equal(t, http.StatusOK, status, text)
				assert.Contains(t, text, strings.TrimSpace(r.f.Unbroken(body)))
			}
			assert.Len(t, r.f.Legs(Prefill), 3)
			assert.Len(t, r.f.Legs(Decode), 3)
			assert.Zero(t, r.f.Open())
			assert.Empty(t, r.f.Faults())
		})
	}
}

// TestEnginesSeeWrongLegs: what would end a real engine or make its text wrong is a fault, and a wrong
// text is none of the right one.
func TestEnginesSeeWrongLegs(t *testing.T) {
	body := harness.Chat("pd", Mark+" there was a fox", 6, false)
	other := harness.Chat("pd", Mark+" there was a dog", 6, false)
	for name, c := range map[string]struct {
		transfer string
		do       func(r *run) string
		want     string
		right    bool
	}{
		"used twice": {"nixl", func(r *run) string {
			a := r.attempt()
			params := r.params(a)
			r.leg(1, a.AppendDecode(nil, &r.q, params), "")
			_, text := r.leg(1, a.AppendDecode(nil, &r.q, params), "")
			return text
		}, "read before", false},
		"too late": {"nixl", func(r *run) string {
			r.f.Lease = -time.Second
			_, text := r.both(r.attempt())
			return text
		}, "after their prefill", false},
		"another prompt": {"nixl", func(r *run) string {
			a := r.attempt()
			params := r.params(a)
			require.NoError(r.t, r.q.Scan(r.tr, transfer.Chat, []byte(other)))
			_, text := r.leg(1, a.AppendDecode(nil, &r.q, params), "")
			return text
		}, "another prompt", false},
		"changed on the way": {"nixl", func(r *run) string {
			a := r.attempt()
			params := bytes.Replace(r.params(a), []byte(`"big":1`), []byte(`"big": 1`), 1)
			_, text := r.leg(1, a.AppendDecode(nil, &r.q, params), "")
			return text
		}, "not the bytes", true},
		"ids used twice": {"nixl-push", func(r *run) string {
			a := r.attempt()
			r.both(a)
			_, text := r.both(a)
			return text
		}, "a second", true},
		"a room used twice": {"sglang", func(r *run) string {
			a := r.attempt()
			r.both(a)
			_, text := r.both(a)
			return text
		}, "a second", true},
		"fields of a client": {"mooncake", func(r *run) string {
			_, text := r.leg(1, []byte(strings.Replace(body, "{", `{"bootstrap_room":1,`, 1)), "")
			return text
		}, "bootstrap_room", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRun(t, c.transfer, body)
			text := c.do(r)
			assert.Contains(t, strings.Join(r.f.Faults(), "\n"), c.want)
			assert.Equal(t, c.right, strings.Contains(text, strings.TrimSpace(r.f.Unbroken(body))), text)
			r.f.faults = nil // they were meant
		})
	}
}

// TestEnginesKnowTheirLives: parameters of an engine that has ended lead to an error, soon after its end,
// and are a fault later.
func TestEnginesKnowTheirLives(t *testing.T) {
	body := harness.Chat("pd", Mark+" there was a fox", 6, false)
	r := newRun(t, "nixl", body)
	a := r.attempt()
	params := r.params(a)
	r.f.engines[0].Stop()
	status, _ := r.leg(1, a.AppendDecode(nil, &r.q, params), "")
	assert.Equal(t, http.StatusInternalServerError, status)
	assert.Empty(t, r.f.Faults())
	r.f.engines[0].Start()
	status, text := r.both(r.attempt())
	assert.Equal(t, http.StatusOK, status, text)
}
