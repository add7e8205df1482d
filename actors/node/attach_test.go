package node_test

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/promtext"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/ports"
)

// remote is an attached engine on a fixed address.
type remote struct {
	t    *testing.T
	addr string
	srv  *http.Server

	pages map[string]string // further answers, by path
	slow  map[string]bool   // paths that it does not answer
}

func newRemote(t *testing.T) *remote {
	e := &remote{t: t, addr: fmt.Sprintf("127.0.0.1:%d", ports.Take(t, 1))}
	t.Cleanup(e.stop)
	return e
}

func (e *remote) start() {
	ln, err := net.Listen("tcp", e.addr)
	require.NoError(e.t, err)
	e.srv = &http.Server{ReadHeaderTimeout: time.Second, Handler: e}
	go func() { _ = e.srv.Serve(ln) }()
}

func (e *remote) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	text, ok := e.pages[r.URL.Path]
	switch {
	case r.URL.Path == "/v1/completions":
		fmt.Fprint(w, `{"choices":[{"finish_reason":"length"}]}`)
	case e.slow[r.URL.Path]:
		<-r.Context().Done()
	case ok:
		fmt.Fprint(w, text)
	case r.URL.Path != "/health":
		w.WriteHeader(http.StatusNotFound)
	}
}

func (e *remote) stop() {
	if e.srv != nil {
		_ = e.srv.Close()
	}
}

func TestAnAttachedUnitWaitsFallsAndComesBack(t *testing.T) {
	t.Parallel()
	for _, coupling := range []app.Coupling{app.Independent, app.Lockstep} {
		t.Run(string(coupling), func(t *testing.T) {
			r := newRig(t)
			a := demo(coupling, 1, "")
			a.Engine = app.Engine{Kind: app.KindAttach}
			var engines []*remote
			for range map[app.Coupling]int{app.Independent: 1, app.Lockstep: 2}[coupling] {
				e := newRemote(t)
				engines = append(engines, e)
				a.Engine.Ranks = append(a.Engine.Ranks, app.AttachRank{URL: "http://" + e.addr})
			}
			a.DataParallel.DPSize = len(engines)
			m := r.start(a)
			r.eventually("it says what it waits for", func() bool {
				s := r.statuses(m)
				return len(s) > 0 && s[0].Phase == string(state.Starting) && s[0].Progress != "" &&
					s[0].InFlight == 0
			})
			for _, e := range engines {
				e.start()
			}
			r.ready(m)
			before := r.statuses(m)[0].Incarnation

			engines[0].stop()
			e := r.expect(msg.UnitFenced)
			assert.Contains(t, e.Reason, "health check")
			assert.Zero(t, r.accepts())
			engines[0].start()
			back := r.expect(msg.UnitReady)
			assert.Equal(t, m.Epoch, back.Epoch)
			assert.Equal(t, len(engines), r.accepts())
			assert.NotEqual(t, before, r.statuses(m)[0].Incarnation)

			r.stop(m, 0)
			e = r.expect(msg.UnitGone, msg.UnitKilling)
			assert.True(t, e.Asked)
			assert.Zero(t, r.accepts())
		})
	}
}

// TestEngineMetrics: each engine gives its page once, with the ranks that it hosts, also one behind a path of
// an https address; one without a page gives none. A call reaches the ranks that it names.
func TestEngineMetrics(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	a := demo(app.Lockstep, 1, "")
	a.Engine = app.Engine{Kind: app.KindAttach, TLS: &app.EngineTLS{InsecureSkipVerify: true}}
	shared, bare := newRemote(t), newRemote(t)
	shared.pages = map[string]string{"/metrics": "x{engine=\"0\"} 1\nx{engine=\"1\"} 2\n"}
	shared.start()
	bare.start()
	behindPath := &remote{t: t, pages: map[string]string{"/metrics": "x 3\n"}}
	secure := httptest.NewTLSServer(http.StripPrefix("/serve/llm", behindPath))
	t.Cleanup(secure.Close)
	for i := range 2 {
		a.Engine.Ranks = append(a.Engine.Ranks,
			app.AttachRank{URL: "http://" + shared.addr, Addressing: app.AddressHeader, Selector: i})
	}
	a.Engine.Ranks = append(a.Engine.Ranks, app.AttachRank{URL: "http://" + bare.addr},
		app.AttachRank{URL: secure.URL + "/serve/llm"})
	a.DataParallel.DPSize = len(a.Engine.Ranks)
	m := r.start(a)
	r.ready(m)
	var got []*msg.EnginePage
	require.NoError(t, r.node.EngineMetrics(t.Context(), func(p *msg.EnginePage) error {
		got = append(got, p)
		return nil
	}))
	assert.ElementsMatch(t, []*msg.EnginePage{
		{Epoch: m.Epoch, Source: promtext.Source{
			App: a.Name, Ranks: []promtext.Rank{{Number: 0, Series: "0"}, {Number: 1, Series: "1"}},
			Text: shared.pages["/metrics"],
		}},
		{Epoch: m.Epoch, Source: promtext.Source{
			App: a.Name, Ranks: []promtext.Rank{{Number: 3}}, Text: behindPath.pages["/metrics"],
		}},
	}, got)

	for _, c := range []struct {
		call msg.EngineCall
		want []int
	}{
		{msg.EngineCall{App: a.Name}, []int{0, 1, 2, 3}},
		{msg.EngineCall{App: a.Name, Ranks: []string{"0/1", "1/2"}}, []int{1}},
		{msg.EngineCall{App: "another"}, nil},
	} {
		c.call.Method, c.call.Path = http.MethodGet, "/metrics"
		var ranks []int
		for _, answer := range r.node.CallEngines(t.Context(), &c.call) {
			ranks = append(ranks, answer.Rank)
		}
		assert.Equal(t, c.want, ranks)
	}
	r.stop(m, 0)
	r.expect(msg.UnitGone, msg.UnitKilling)
}
