package inprocess

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/ingress"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// joinLimit is how soon an ingress that joins must know what one does that was there all the time.
const joinLimit = 2 * time.Second

// KV2: an ingress joins after a thousand batches, and joins again.
func TestKV2AnIngressJoinsLate(t *testing.T) {
	if testing.Short() {
		t.Skip("tens of thousands of batches")
	}
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newKVRig(t)
		r.Deploy(simApp("a", 4, "independent",
			"sim_step_ms: 5, num_gpu_blocks_override: 2048, max_model_len: 4096", kvLocality))
		st := r.WaitStatus("a", "RUNNING")
		total, newest := uint64(0), 0
		for first := 0; total < 1000; first += 400 {
			r.spread("a", 4, first, 400, 5*blockTokens)
			total, newest = 0, first // the caches are full: older prompts may be evicted
			for i := range 4 {
				_, n := r.held(st.Units[i].Ranks[0].URL)
				total += n
			}
		}
		for _, life := range []string{"joins", "restarts"} {
			own := r.settled("a") // the prompt of the life before may have evicted blocks
			in := r.join("late", nil)
			took := soon(t, joinLimit, "the index is equal", func() error {
				return same(in.dump(t, "a").only("gpu"), own)
			})
			require.NoError(t, same(in.dump(t, "a"), r.dump("a")), "with every tier")
			ix := in.Index("a")
			out := r.must(kvAsk{addr: in.addr, app: "a", ids: kvDoc(newest+2, 5*blockTokens)})
			assert.Equal(t, "0/2", out.rank, "it routes by what it knows")
			t.Logf("KV2: an ingress %s after %d batches: %d blocks, equal after %s", life, total,
				ix.Blocks, took)
			in.cut()
		}
		r.idle()
	})
}

// KV2: dpserve itself joins an engine whose replay buffer no longer has the beginning.
func TestKV2DpserveJoinsAnEngineLate(t *testing.T) {
	if testing.Short() {
		t.Skip("tens of thousands of batches")
	}
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const batches = 20_000
		r := newKVRig(t)
		s := r.byHand(handFlags(0, "a", true, "--sim-step-ms", "1", "--block-size", "1", "--max-model-len",
			"40000")...)
		api, events, replay := handPorts(0)
		for n := uint64(0); n < batches; { // every step fills a block
			body, err := json.Marshal(map[string]any{
				"model": "a", "prompt": kvDoc(int(n), 8),
				"max_tokens": 5000, "ignore_eos": true,
			})
			require.NoError(t, err)
			r.engine(http.MethodPost, "http://"+api+"/v1/completions", string(body))
			_, n = r.held("http://" + api)
		}
		r.Deploy(attached("a", kvLocality, fmt.Sprintf(
			`{url: "http://%s", kv_events: {connect: "tcp://%s", replay: "tcp://%s"}}`, api, events, replay)))
		r.WaitStatus("a", "RUNNING")
		var kv *client.KVStatus
		r.Until("its events are partial", func() error {
			if kv = r.Rank("a", 0, 0).KV; kv == nil || kv.Events == nil ||
				kv.Events.State != client.EventsPartial || kv.Events.Batches < batches/2 {
				return fmt.Errorf("%+v", kv)
			}
			return nil
		})
		before, replayed := len(r.warnings()), len(r.dump("a")["0/0 gpu"])
		for i := range 50 {
			r.must(kvAsk{app: "a", ids: kvDoc(100_000+i, 40)})
		}
		time.Sleep(3 * time.Second)
		for i := range 50 {
			x := r.explain("a", kvDoc(100_000+i, 40))
			assert.Equal(t, []int{39}, kvHits(&x), "it fills again")
		}
		assert.Len(t, r.dump("a")["0/0 gpu"], replayed+50*40, "by events")
		assert.Len(t, r.warnings(), before, "no line per request")
		kv = r.Rank("a", 0, 0).KV
		assert.Equal(t, client.EventsPartial, kv.Events.State)
		r.Quiet()
		t.Logf("KV2: dpserve joins after %d batches with a buffer of 10000: %s, %d batches applied, "+
			"%d dropped, %d blocks; warnings %d",
			s.BlockTables()[0].Next, kv.Events.State, kv.Events.Batches, kv.Events.Dropped, kv.Blocks, before)
	})
}

// streams are running answers, each with its own prompt.
type streams struct {
	mu    sync.Mutex
	wg    sync.WaitGroup
	ok    int
	other []string
}

func (s *streams) run(n int, one func(i int) *harness.Stream) {
	for i := range n {
		s.wg.Go(func() {
			out := one(i)
			s.mu.Lock()
			defer s.mu.Unlock()
			if out.OK() {
				s.ok++
			} else {
				s.other = append(s.other, out.String())
			}
		})
	}
}

// load is what an ingress takes the ranks' load to be: in-flight requests and the tokens of KV cache they
// need.
func load(t *testing.T, s *second, app string) map[string]any {
	t.Helper()
	loads, err := s.PotentialLoads(app, nil)
	require.NoError(t, err)
	x, err := s.ExplainRoute(t.Context(), app, &client.Query{TokenIDs: kvDoc(1, 4)})
	require.NoError(t, err)
	out := map[string]any{}
	for _, l := range loads {
		out[l.Worker] = l
	}
	for i := range x.Ranks {
		k := &x.Ranks[i]
		out[k.Worker+" in flight"] = k.InFlight
		if k.KVUsage != nil {
			out[k.Worker+" usage"] = *k.KVUsage
		}
	}
	return out
}

func sameLoad(a, b map[string]any) error {
	for _, key := range slices.Sorted(maps.Keys(a)) {
		if !reflect.DeepEqual(a[key], b[key]) {
			return fmt.Errorf("%s: %v here, %v there", key, a[key], b[key])
		}
	}
	return nil
}

// dials records where an ingress connects to.
type dials struct {
	mu    sync.Mutex
	addrs map[string]int
}

func (d *dials) list() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(maps.Keys(d.addrs))
}

// KV14: three ingresses under load, all killed; a new one knows everything from the replicas alone.
func TestKV14AnIngressFromTheReplicasAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newKVRig(t)
		r.Expect(harness.StreamBreaks)
		r.Deploy(simApp("a", 4, "independent", "sim_step_ms: 20", kvLocality))
		st := r.WaitStatus("a", "RUNNING")
		r.must(kvAsk{app: "a", rank: "0/3", ids: kvDoc(7, 30*blockTokens)})
		var kept, cut streams
		kept.run(16, func(int) *harness.Stream { return r.StreamChat(t.Context(), "a", 500) })
		var old []*second
		for i := range 3 {
			in := r.join(fmt.Sprintf("old-%d", i), nil)
			old = append(old, in)
			soon(t, joinLimit, "it knows its ranks", func() error {
				if !in.Ready() {
					return fmt.Errorf("no rank is ready")
				}
				return nil
			})
			cut.run(8, func(k int) *harness.Stream {
				return r.stream(in.addr, "a", kvDoc(1000+i*8+k, 20*blockTokens), 1500)
			})
		}
		time.Sleep(2 * time.Second)
		for _, in := range old {
			in.cut()
		}
		cut.wg.Wait()
		assert.Zero(t, cut.ok, "their streams died with them")
		time.Sleep(time.Second)

		d := &dials{addrs: map[string]int{}}
		in := r.join("new", func(c *ingress.Config) {
			c.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
				d.mu.Lock()
				d.addrs[addr]++
				d.mu.Unlock()
				return r.Net.DialContext(ctx, network, addr)
			}
		})
		fresh := r.join("fresh", nil)
		took := soon(t, joinLimit, "index and load are those of a full snapshot", func() error {
			if err := same(in.dump(t, "a"), r.dump("a")); err != nil {
				return err
			}
			if err := same(in.dump(t, "a"), fresh.dump(t, "a")); err != nil {
				return err
			}
			return sameLoad(load(t, fresh, "a"), load(t, in, "a"))
		})
		loaded := load(t, in, "a")
		assert.Empty(t, d.list(), "it has called nobody")
		assert.Contains(t, fmt.Sprint(loaded), "in flight:4", "the load of the ingress that lives is in it")
		out := r.must(kvAsk{addr: in.addr, app: "a", ids: kvDoc(7, 30*blockTokens)})
		assert.Equal(t, "0/3", out.rank, "the holder of the prefix")
		assert.Equal(t, 29*blockTokens, out.cached)
		engines := map[string]bool{}
		for _, u := range st.Units {
			engines[strings.TrimPrefix(u.Ranks[0].URL, "http://")] = true
		}
		for _, addr := range d.list() {
			assert.True(t, engines[addr], "%s is no engine", addr)
		}
		kept.wg.Wait()
		assert.Equal(t, 16, kept.ok, kept.other)
		r.idle()
		t.Logf("KV14: joined %s after its start: %v; calls %v; first request to %s with %d cached",
			took, in.dump(t, "a").sizes(), d.list(), out.rank, out.cached)
	})
}

// stream runs one streaming completion of token ids through an ingress to its end, or until it breaks.
func (r *kvRig) stream(addr, app string, ids []uint32, tokens int) *harness.Stream {
	body, err := json.Marshal(map[string]any{
		"model": app, "prompt": ids, "max_tokens": tokens,
		"ignore_eos": true, "stream": true,
	})
	if err != nil {
		return &harness.Stream{Err: err}
	}
	resp, err := r.post(addr, "/v1/completions", string(body))
	if err != nil {
		return &harness.Stream{Err: err}
	}
	return harness.ReadStream(resp)
}

// KV15: the Router is reset under 64 streams.
func TestKV15ResetUnderLoad(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newKVRig(t)
		r.Deploy(simApp("a", 4, "independent", "sim_step_ms: 20", kvLocality) +
			simApp("b", 4, "independent", "sim_step_ms: 20",
				"routing: {policy: session-affinity, preset: tuned}")[len("applications:\n"):])
		r.WaitStatus("a", "RUNNING")
		r.WaitStatus("b", "RUNNING")
		r.spread("a", 4, 0, 40, 10*blockTokens)
		turn := `{"model":"b","user":"u","messages":[{"role":"user","content":"hi"}],` +
			`"max_tokens":2,"stream":true,"ignore_eos":true}`
		for range 5 {
			resp, err := r.post("", "/v1/chat/completions", turn)
			require.NoError(t, err)
			require.True(t, harness.ReadStream(resp).OK())
		}
		remembered := r.why("b", turn)
		other := r.join("other", nil)
		var s streams
		s.run(64, func(i int) *harness.Stream { return r.stream("", "a", kvDoc(1000+i, 8*blockTokens), 100) })
		time.Sleep(500 * time.Millisecond)

		for _, app := range []string{"a", "b"} {
			code, answer := r.Do(http.MethodPost, "/api/v1/routers/"+app+"/reset", "")
			require.Equal(t, http.StatusOK, code, answer)
		}
		fresh := r.join("fresh", nil)
		took := soon(t, joinLimit, "all ingresses know what the replicas do", func() error {
			want := fresh.dump(t, "a")
			if len(want.only("gpu")) != 4 {
				return fmt.Errorf("%v", want.sizes())
			}
			return firstOf(same(r.dump("a"), want), same(other.dump(t, "a"), want),
				sameLoad(load(t, fresh, "a"), load(t, other, "a")))
		})
		assert.NotEqual(t, remembered, r.why("b", turn), "what the policy remembered is gone")
		s.wg.Wait()
		assert.Equal(t, 64, s.ok, s.other)
		for _, app := range []string{"a", "b"} {
			resets := 0
			for _, e := range r.Events(app) {
				if e.Kind == "router-reset" {
					resets++
				}
			}
			assert.Equal(t, 1, resets, "one line in the events of %s", app)
		}
		r.settled("a")
		r.idle()
		t.Logf("KV15: 64 of %d streams whole; equal %s after the reset; "+
			"session-affinity before: %s, after: %s",
			s.ok, took, remembered, r.why("b", turn))
	})
}

func firstOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// why describes how the Router decides for a request.
func (r *kvRig) why(app, request string) string {
	r.t.Helper()
	body, err := json.Marshal(map[string]any{"request": json.RawMessage(request)})
	require.NoError(r.t, err)
	code, answer := r.Do(http.MethodPost, "/api/v1/routers/"+app+"/explain", string(body))
	require.Equal(r.t, http.StatusOK, code, answer)
	var x client.Explanation
	require.NoError(r.t, json.Unmarshal([]byte(answer), &x))
	return x.Reason
}
