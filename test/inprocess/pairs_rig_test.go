package inprocess

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/pairengine"
)

// pairRig is a node in memory in front of stub engines of one transfer, as application "pd". The engines
// check every field of every leg (pairengine.Fleet); each answer is compared with the text of one engine.
type pairRig struct {
	*harness.Cluster
	t       *testing.T
	engines *pairengine.Fleet
	prefill []*pairengine.Engine
	decode  []*pairengine.Engine
}

// newPairRig starts engines of their own address. disaggregation are keys of that name beside the transfer,
// more are further lines of the application.
func newPairRig(t *testing.T, transfer string, prefills, decodes int, disaggregation string,
	more ...string,
) *pairRig {
	t.Helper()
	r := newPairEngines(t, transfer)
	for range prefills {
		r.addPrefill(1)
	}
	for range decodes {
		r.addDecode(pairengine.Decode, 1)
	}
	r.serve(disaggregation, more...)
	return r
}

// newPairEngines is a rig without engines and without an application.
func newPairEngines(t *testing.T, transfer string) *pairRig {
	t.Helper()
	r := &pairRig{t: t, engines: pairengine.New(t, transfer, "pd")}
	r.Cluster = harness.New(t)
	r.engines.Listen = r.Net.Listen
	return r
}

func (r *pairRig) addPrefill(ranks int) *pairengine.Engine {
	e := r.engines.Add(pairengine.Prefill, fmt.Sprintf("127.0.0.1:%d", 8100+len(r.prefill)), ranks)
	r.prefill = append(r.prefill, e)
	return e
}

func (r *pairRig) addDecode(role string, ranks int) *pairengine.Engine {
	e := r.engines.Add(role, fmt.Sprintf("127.0.0.1:%d", 8200+len(r.decode)), ranks)
	r.decode = append(r.decode, e)
	return e
}

// serve deploys the application and waits until every pair has met.
func (r *pairRig) serve(disaggregation string, more ...string) {
	r.t.Helper()
	r.Deploy(r.engines.App(disaggregation, more...))
	r.WaitStatus("pd", "RUNNING")
	r.met()
}

// met waits until all pairs of prefill and decode ranks have met.
func (r *pairRig) met() {
	r.t.Helper()
	r.Until("all pairs have met", func() error { return haveMet(r.Cluster, r.pairs()) })
	r.forget()
}

// pairs is how many pairs the engines make.
func (r *pairRig) pairs() int {
	prefills, decodes := 0, 0
	for _, e := range r.prefill {
		prefills += max(1, e.Ranks)
	}
	for _, e := range r.decode {
		if e.Role == pairengine.Decode {
			decodes += max(1, e.Ranks)
		}
	}
	return prefills * decodes
}

// forget drops the legs so far, when all have ended.
func (r *pairRig) forget() {
	synctest.Wait()
	r.engines.Forget()
}

// haveMet says whether all pairs have met.
func haveMet(c *harness.Cluster, pairs int) error {
	st, _ := c.App("pd")
	if st.PD == nil {
		return fmt.Errorf("status says nothing about pairs: %+v", st)
	}
	if st.PD.All != pairs || st.PD.Met != pairs {
		return fmt.Errorf("%d of %d pairs have met: %s", st.PD.Met, st.PD.All, st.PD.Pairs)
	}
	return nil
}

// pairStatus is what status says about pairs.
func (r *pairRig) pairStatus() client.PDStatus {
	r.t.Helper()
	st, _ := r.App("pd")
	require.NotNil(r.t, st.PD)
	return *st.PD
}

// pairBody is the body of a streamed chat about a thing; equal things are equal prompts.
func pairBody(thing string, tokens int) string {
	return harness.Chat("pd", pairengine.Mark+" there was "+thing, tokens, true)
}

// pairReply is what a client saw.
type pairReply struct {
	*harness.Stream
	body string
}

// ask sends a chat to its end.
func (r *pairRig) ask(body string, header ...string) *pairReply {
	return r.askFor(context.Background(), "/v1/chat/completions", body, header...)
}

func (r *pairRig) askFor(ctx context.Context, path, body string, header ...string) *pairReply {
	began := time.Now()
	resp, err := r.Post(ctx, path, body, header...)
	if err != nil {
		return &pairReply{Stream: &harness.Stream{Err: err, Total: time.Since(began)}, body: body}
	}
	return &pairReply{Stream: harness.ReadAnswer(resp, began), body: body}
}

// right asserts that a reply is whole and has the text that one engine gives.
func (r *pairRig) right(a *pairReply) {
	r.t.Helper()
	if assert.True(r.t, a.OK(), "%v\n%s", a, a.body) {
		assert.Equal(r.t, r.engines.Unbroken(a.body), a.Text, "%v", a)
	}
}

// total is the value of a counter of the node's /metrics, summed over the series that have all the labels.
func (r *pairRig) total(name string, labels ...string) float64 {
	r.t.Helper()
	return sumSeries(metricsOf(r.t, r.Peer(0)), name, labels...)
}

// sumSeries adds the values of a metric's series that have all the labels, as name="value".
func sumSeries(page, name string, labels ...string) (sum float64) {
	for line := range strings.Lines(page) {
		if rest, ok := strings.CutPrefix(line, name); !ok || rest == "" || rest[0] != '{' && rest[0] != ' ' {
			continue
		}
		has := true
		for _, label := range labels {
			has = has && strings.Contains(line, label)
		}
		var v float64
		if _, err := fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &v); has && err == nil {
			sum += v
		}
	}
	return sum
}

// rest waits until nothing is in hand anywhere, and asserts that no leg outlived the others' end by more than
// a second.
func (r *pairRig) rest() {
	r.t.Helper()
	r.Quiet()
	r.Until("no engine has a request", func() error {
		if n := r.engines.Open(); n > 0 {
			return fmt.Errorf("%d are open", n)
		}
		return nil
	})
	assert.Empty(r.t, r.engines.Faults())
}

// cancelled asserts that a leg was ended by its caller within a second of a moment.
func cancelled(t *testing.T, l *pairengine.Leg, since time.Time) {
	t.Helper()
	assert.True(t, l.Left, "%s leg at %s: its connection was closed before its answer", l.Side, l.At.Name)
	assert.LessOrEqual(t, l.Ended.Sub(since), time.Second, "%s leg at %s", l.Side, l.At.Name)
}

// engineNames are the engines of some legs.
func engineNames(legs []pairengine.Leg) (names []string) {
	for i := range legs {
		names = append(names, legs[i].At.Name)
	}
	return names
}

// add and remove change the ranks of the application as the admin API does.
func (r *pairRig) add(e *pairengine.Engine) {
	r.t.Helper()
	body, err := json.Marshal(map[string]string{"url": "http://" + e.Addr, "role": e.Role})
	require.NoError(r.t, err)
	code, text := r.Do(http.MethodPost, "/api/v1/apps/pd/ranks", string(body))
	require.Equal(r.t, http.StatusAccepted, code, text)
}

func (r *pairRig) remove(e *pairengine.Engine) {
	r.t.Helper()
	code, text := r.Do(http.MethodDelete, "/api/v1/apps/pd/ranks?url=http%3A%2F%2F"+
		strings.ReplaceAll(e.Addr, ":", "%3A"), "")
	require.Equal(r.t, http.StatusAccepted, code, text)
}

// bubble runs a test on fake time, beside others.
func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, f)
	})
}
