package app

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// CC43: faults about services, each with what to write.
func TestFaultsOfServices(t *testing.T) {
	t.Parallel()
	services := func(list string, more ...string) string {
		return with("kind: attach, services: ["+list+"]", more...)
	}
	const one = "{url: 'dns://vllm:8000'}"
	for text, want := range map[string]string{
		services(""):                                            "found 0 services, wanted 1 to 16 services",
		services("{url: 'http://vllm:8000'}"):                   "wanted dns://HOST:PORT or dns+https://",
		services("{url: 'dns://vllm'}"):                         "wanted dns://HOST:PORT",
		services("{url: 'dns://:8000'}"):                        "wanted dns://HOST:PORT",
		services("{url: 'dns://u:p@vllm:8000'}"):                "leave user and password out",
		services("{url: 'dns://vllm:8000/v1'}"):                 "leave /v1 out",
		services("{url: 'dns://vllm:0'}"):                       "ports go from 1 to 65535",
		services(one + ", " + one):                              `service "dns://vllm:8000" is taken by`,
		services(one, "num_replicas: 2"):                        "leave it out",
		services(one, "data_parallel: {coupling: lockstep}"):    "cannot come and go",
		services("{url: 'dns://vllm:8000', role: prefill}"):     "the decode pool has no rank",
		with("kind: attach, ranks: [{url: 'dns://vllm:8000'}]"): "write it in engine.services",
		with("kind: sim, services: [" + one + "]"):              "services belongs to kind attach",
		with("kind: attach, ranks: [{url: 'http://a:1'}, {url: 'http://b:1', group: 1}], services: [" + one +
			"]"): "an application with services has one group",
		services("{url: 'dns://p:1', role: prefill}, {url: 'dns://d:1'}",
			"disaggregation: {transfer: mooncake}"): "list the prefill engines in engine.ranks",
	} {
		assert.Contains(t, strings.Join(faultsOf(t, text), "\n"), want, text)
	}
}

// Ranks of a service have its scheme, port and path, the printed file does not list them, and the file that
// is deployed again takes them over. A number that the file gives to another rank is free for no other.
func TestRanksOfServices(t *testing.T) {
	t.Parallel()
	const file = "applications: [{name: pd, model: {id: m}, engine: {kind: attach, ranks: " +
		"[{url: 'http://a:1'}], services: [{url: 'dns://p:1', role: prefill}, " +
		"{url: 'dns+https://vllm.default.svc:8443/x', model: qwen, node: gpu-1}]}}]"
	f := parsed(t, file)
	decode := f.Applications[1]
	s := decode.Engine.Services[0]
	assert.Equal(t, "vllm.default.svc", s.Host())
	grown := decode
	for _, address := range []string{"10.0.0.1", "fd00::1", "10.0.0.2"} {
		r := s.Ranks([]netip.Addr{netip.MustParseAddr(address)})[0]
		assert.Equal(t, s.Host(), r.ServerName())
		var err error
		grown, _, err = grown.WithRank(r, idle)
		require.NoError(t, err)
	}
	assert.Equal(t, AttachRank{
		URL: "https://[fd00::1]:8443/x", Addressing: AddressURL, Model: "qwen", Role: RoleBoth, Node: "gpu-1",
		Service: s.URL,
	}, grown.Engine.Ranks[2])
	text := string((&File{Applications: []*Application{f.Applications[0], grown}}).Print())
	assert.Equal(t, string(f.Print()), text)
	assert.Equal(t, f, parsed(t, text))

	shrunk, _, err := grown.WithoutRank(RankRef{URL: grown.Engine.Ranks[1].URL})
	require.NoError(t, err)
	assert.Equal(t, shrunk, decode.WithServiceRanksOf(shrunk), "nothing has changed")
	other := parsed(t, `applications: [{name: pd, model: {id: m}, engine: {kind: attach, ranks: `+
		`[{url: 'http://a:1'}, {url: 'http://b:1'}, {url: 'http://c:1'}], services: [{url: 'dns://p:1', `+
		`role: prefill}, {url: 'dns+https://vllm.default.svc:8443/x'}]}}]`).Applications[1]
	kept := other.WithServiceRanksOf(shrunk)
	assert.Equal(t, []int{0, 1, 2, 3, 4}, kept.RankNumbers(0))
	assert.Equal(t, "https://10.0.0.2:8443/x", kept.Engine.Rank(0, 3).URL)
	assert.Equal(t, "https://[fd00::1]:8443/x", kept.Engine.Rank(0, 4).URL, "2 is c's")
	assert.Empty(t, kept.Engine.Rank(0, 4).Model)

	none, err := kept.WithoutService(s.URL)
	require.NoError(t, err)
	assert.Equal(t, []int{0, 1, 2}, none.RankNumbers(0))
	assert.Empty(t, none.Engine.Services)
}
