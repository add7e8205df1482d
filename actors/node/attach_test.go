package node_test

import (
	"fmt"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
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
	e.srv = &http.Server{
		ReadHeaderTimeout: time.Second,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
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
		}),
	}
	go func() { _ = e.srv.Serve(ln) }()
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
