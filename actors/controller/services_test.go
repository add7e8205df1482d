package controller

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// Failures of a lookup.
var (
	errNoName   = &net.DNSError{Err: "no such host", IsNotFound: true}
	errSick     = &net.DNSError{Err: "server misbehaving", IsTemporary: true}
	errRefused  = &net.DNSError{Err: "read udp 10.0.0.1:40001->10.0.0.2:53: read: connection refused"}
	errTooSlow  = &net.DNSError{Err: "read udp 10.0.0.1:5353: i/o timeout", IsTimeout: true}
	errNoAnswer = context.DeadlineExceeded
)

// CC41: what the lookups of a service add and remove. A name server that fails takes no rank away, and one
// that knows no address only ranks whose engines are not healthy; a shorter list does, after a while.
func TestLookupsOfAService(t *testing.T) {
	type look struct {
		at     int // seconds
		answer any // addresses, or an error
		want   string
	}
	const cannot = "(its name cannot be resolved, and its ranks stay: "
	const some = " addresses, of which at most 256 are attached)"
	many := make([]string, 300)
	for i := range many {
		many[i] = fmt.Sprintf("10.0.%d.%d", 1+i/100, i%100)
	}
	for name, c := range map[string]struct {
		sick  string // addresses whose engines are not healthy
		looks []look
	}{
		"comes and goes": {looks: []look{
			{0, "a b", "+a +b"},
			{5, "a b c", "+c"},
			{10, "a c", ""},
			{15, "a c", ""},
			{21, "a c", "-b"},
			{26, "a b c", "+b"},
		}},
		"flaps": {looks: []look{
			{0, "a b", "+a +b"},
			{5, "a", ""},
			{10, "a b", ""},
			{15, "a", ""},
			{20, "b", ""},
			{26, "b", ""},
			{30, "b", "-a"},
		}},
		"all are replaced": {looks: []look{{0, "a", "+a"}, {5, "b", "+b"}, {10, "b", ""}, {15, "b", "-a"}}},
		"a failure begins the time anew": {looks: []look{
			{0, "a b", "+a +b"},
			{5, "a", ""},
			{10, errTooSlow, cannot + "the name server does not answer)"},
			{15, "a", ""},
			{20, "a", ""},
			{25, "a", "-b"},
		}},
		"the name server fails": {sick: "b", looks: []look{
			{0, "a b", "+a +b"},
			{5, errSick, cannot + "server misbehaving)"},
			{10, errRefused, cannot + "connection refused)"}, // the port is another one each time
			{900, errNoAnswer, cannot + "the name server does not answer)"},
			{905, "a b", ""},
		}},
		"the name is gone": {sick: "b", looks: []look{
			{0, "a b", "+a +b"},
			{5, errNoName, "(its name has no address)"},
			{34, "", "(its name has no address)"},
			{35, errNoName, "-b (its name has no address)"},
			{900, errNoName, "(its name has no address)"},
			{905, "a b", "+b"},
		}},
		"the name is gone for a moment": {sick: "a", looks: []look{
			{0, "a", "+a"},
			{5, "", "(its name has no address)"},
			{10, errSick, cannot + "server misbehaving)"},
			{36, errNoName, "(its name has no address)"},
			{41, "a", ""},
		}},
		"300 addresses": {looks: []look{
			{0, strings.Join(many, " "), "+" + strings.Join(many[:256], " +") +
				" (its name has 300" + some},
			{5, strings.Join(many[2:], " "), "(its name has 298" + some},
			{15, strings.Join(many[2:], " "), "+" + many[256] + " +" + many[257] + " -" + many[0] + " -" +
				many[1] + " (its name has 298" + some},
		}},
		"IPv4 and IPv6": {looks: []look{
			{0, "fd00::2 fd00::1", "+[fd00::1] +[fd00::2]"},
			{5, "fd00::1 a fd00::2 a ::ffff:10.0.0.1", "+a"},
			{15, "fd00::1 a", "-[fd00::1] -[fd00::2]"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			short := strings.NewReplacer("http://10.0.0.1:8000", "a", "http://10.0.0.2:8000", "b",
				"http://10.0.0.3:8000", "c", "http://", "", ":8000", "")
			s, v, attached := &app.AttachService{URL: "dns://vllm:8000"}, serviceView{}, map[string]bool{}
			for _, k := range c.looks {
				err, _ := k.answer.(error)
				text, _ := k.answer.(string)
				l := lookup{time.Unix(int64(k.at), 0), s.Ranks(addresses(text)), err}
				add, remove := v.next(&l, attached)
				var did []string
				for _, r := range add {
					u := short.Replace(r.URL)
					attached[r.URL] = !strings.Contains(c.sick, u)
					did = append(did, "+"+u)
				}
				for _, u := range remove {
					delete(attached, u)
					did = append(did, "-"+short.Replace(u))
				}
				if v.note != "" {
					did = append(did, "("+v.note+")")
				}
				assert.Equal(t, k.want, strings.Join(did, " "), "after %d s", k.at)
			}
		})
	}
}

// addresses reads addresses; a, b and c stand for 10.0.0.1 to 10.0.0.3.
func addresses(text string) []netip.Addr {
	var out []netip.Addr
	for _, word := range strings.Fields(text) {
		if len(word) == 1 {
			word = fmt.Sprintf("10.0.0.%d", word[0]-'a'+1)
		}
		out = append(out, netip.MustParseAddr(word))
	}
	return out
}

// names is a Resolver of one answer for all names.
type names struct {
	mu   sync.Mutex
	text string
	err  error
}

func (n *names) set(text string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.text, n.err = text, err
}

func (n *names) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return addresses(n.text), n.err
}

// CC42: a service is followed from its deploy on, or from `ranks add` to `ranks remove`. A deploy of the same
// file changes none of its ranks, whose engines dpserve finds again by the next answers.
func TestAServiceIsFollowed(t *testing.T) {
	dns := &names{}
	dns.set("", errNoName)
	rigged(t, func(c *Config) { c.Resolver = dns }, func(t *testing.T, r *rig) {
		const file = "applications: [{name: ext, model: {id: m}, engine: {kind: attach, services: " +
			"[{url: 'dns://vllm:8000'}]}}]"
		parse := func() *app.Application {
			f, _, err := app.Parse(app.Default(), "app.yaml", []byte(file))
			require.NoError(t, err)
			return f.Applications[0]
		}
		ranks := AttachedRanks{r.Controller}
		are := func(want ...string) {
			t.Helper()
			time.Sleep(12 * time.Second)
			synctest.Wait()
			urls, err := AttachedURLs(r.store.State(), "ext")
			require.NoError(t, err)
			assert.Equal(t, want, urls)
		}
		r.deploy(t, parse())
		status := r.Status()[0]
		assert.Equal(t, "DEPLOYING", status.Status)
		assert.Equal(t, "dns://vllm:8000: its name has no address", status.Message)

		dns.set("a b", nil)
		are("http://10.0.0.1:8000", "http://10.0.0.2:8000")
		assert.Equal(t, "RUNNING", r.Status()[0].Status)
		assert.Empty(t, r.Status()[0].Message)
		dns.set("b c", nil)
		are("http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000")
		are("http://10.0.0.2:8000", "http://10.0.0.3:8000")
		before := r.agent.seen()
		plan, err := r.Plan([]*app.Application{parse()}, false)
		require.NoError(t, err)
		assert.False(t, plan.Changes, "%+v", plan.Apps)
		r.deploy(t, parse())
		are("http://10.0.0.2:8000", "http://10.0.0.3:8000")
		assert.Equal(t, before, r.agent.seen(), "no rank was started or stopped")

		_, err = ranks.Remove(t.Context(), "ext", app.RankRef{URL: "http://10.0.0.2:8000"}, nil)
		assert.Equal(t, problem.Conflict, problem.CodeOf(err))
		require.ErrorContains(t, err, "http://10.0.0.2:8000 is an address of dns://vllm:8000")
		_, err = ranks.Add(t.Context(), "ext", []byte(`{"url": "dns://vllm:8000"}`))
		require.ErrorContains(t, err, "dns://vllm:8000 is attached to ext already")
		_, err = ranks.Remove(t.Context(), "ext", app.RankRef{URL: "dns://vllm:8000"}, nil)
		require.ErrorContains(t, err, "dns://vllm:8000 is all that ext has")

		added, err := ranks.Add(t.Context(), "ext", []byte(`{"url": "dns+https://[fd00::1]:9/team"}`))
		require.NoError(t, err)
		assert.True(t, added.Service)
		are("https://10.0.0.2:9/team", "http://10.0.0.2:8000", "http://10.0.0.3:8000",
			"https://10.0.0.3:9/team")
		gone, err := ranks.Remove(t.Context(), "ext", app.RankRef{URL: "dns://vllm:8000"}, new(time.Duration))
		require.NoError(t, err)
		assert.Equal(t, "dns://vllm:8000", gone.URL)
		are("https://10.0.0.2:9/team", "https://10.0.0.3:9/team")
		_, err = ranks.Remove(t.Context(), "ext", app.RankRef{URL: "dns://vllm:8000"}, nil)
		assert.Equal(t, problem.NotFound, problem.CodeOf(err))
	})
}
