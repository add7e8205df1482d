package inprocess

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

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// names is a name server of one name.
type names struct {
	mu        sync.Mutex
	addresses []string
	err       error
}

func (n *names) answer(err error, addresses ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err, n.addresses = err, addresses
}

// LookupNetIP implements controller.Resolver.
func (n *names) LookupNetIP(context.Context, string, string) (out []netip.Addr, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, a := range n.addresses {
		out = append(out, netip.MustParseAddr(a))
	}
	return out, n.err
}

// CC44: a service that has no address yet begins to serve with its first engine, another address is another
// rank, and one that leaves takes its rank with it. What listens at an address and is no engine gets no
// request, and status says what is wrong. While the name server fails nothing changes, and no request fails.
func TestEnginesOfAServiceComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dns := &names{}
		dns.answer(&net.DNSError{Err: "no such host", IsNotFound: true})
		r := newKVRig(t, harness.Resolver(dns))
		r.Expect(harness.Fault{
			{Msg: "a service has a fault", Why: "the name server fails, and knows no address at first"},
		})
		engine := func(host string) {
			r.byHand("--host", host, "--port", "8100", "--served-model-name", "a", "--sim-step-ms", "1")
		}
		engine("127.0.0.1")
		engine("127.0.0.2")
		r.Deploy(`applications:
  - name: a
    model: {id: a}
    routing: {policy: round-robin}
    engine: {kind: attach, services: [{url: "dns://vllm.default.svc:8100"}]}
`)
		serves := func(what string, status string, ranks ...string) {
			t.Helper()
			r.Until(what, func() error {
				a, _ := r.App("a")
				var ready []string
				for _, u := range a.Units {
					if u.Phase == "ready" {
						ready = append(ready, client.RankName(u.Group, u.Ranks[0].Rank))
					}
				}
				if a.Status != status || fmt.Sprint(ready) != fmt.Sprint(ranks) {
					return fmt.Errorf("%s: %v, %s", a.Status, ready, a.Message)
				}
				return nil
			})
			for range 2 * len(ranks) {
				s := r.StreamChat(t.Context(), "a", 3)
				assert.True(t, s.OK(), "%s: %v", what, s)
				assert.Contains(t, ranks, s.Rank, what)
			}
		}
		serves("no address", "DEPLOYING")
		dns.answer(nil, "127.0.0.1")
		serves("the first address", "RUNNING", "0/0")
		dns.answer(nil, "127.0.0.2", "127.0.0.1", "127.0.0.3")
		serves("another engine, and an address without one", "DEPLOYING", "0/0", "0/1")
		r.Until("status says what is wrong with the third", func() error {
			if says := r.Rank("a", 0, 2).Progress; !strings.Contains(says, "127.0.0.3:8100") {
				return fmt.Errorf("it says %q", says)
			}
			return nil
		})
		dns.answer(&net.DNSError{Err: "server misbehaving", IsTemporary: true})
		time.Sleep(2 * time.Minute)
		serves("the name server fails", "DEPLOYING", "0/0", "0/1")
		dns.answer(nil, "127.0.0.2")
		serves("one address is left", "RUNNING", "0/1")
		r.Quiet()
	})
}
