package house_test

import "strings"

// module is the path every import inside the repository begins with.
const module = "github.com/dpserve/dpserve/"

// area is one row of the table of layers: a folder with its subfolders.
type area struct {
	name  string   // the folder
	layer int      // -1 below all others, 4 tests
	also  []string // areas that may be imported although they are not in a lower layer
	deny  []string // import path prefixes that are refused, whatever the layer
}

// Libraries that are named in more than one row.
const (
	gin      = "github.com/gin-gonic/"
	raft     = "github.com/hashicorp/raft"
	gossip   = "github.com/hashicorp/memberlist"
	cobra    = "github.com/spf13/"
	actorLib = "github.com/asynkron/"
	metrics  = "github.com/prometheus/"
)

// io lists the packages that a pure area and actors/msg must not import.
func io() []string {
	return []string{
		"net", "net/http", "net/http/", "net/rpc", "net/smtp", "os", "os/", "syscall", "golang.org/x/sys/",
		"io/ioutil", "embed", "plugin", "log", "log/", "expvar", "runtime/pprof", "runtime/trace", "testing",
		gin, raft, gossip, cobra, actorLib, metrics, "google.golang.org/grpc", "go.opentelemetry.io/",
	}
}

// areas is the table of layers. Every folder with Go code belongs to the row with the longest matching name.
// A folder without a row fails the test, so a new area gets its layer on purpose.
func areas() []area {
	thin := []string{gin}
	return []area{
		{name: "internal", layer: -1, deny: []string{gin, raft, gossip, cobra}},

		// A shim lives beside each engine, for as long as it: it must stay small.
		{
			name: "internal/shim", layer: -1, also: []string{"internal"},
			deny: []string{gin, raft, gossip, cobra, actorLib, metrics, "google.golang.org/", "net/http"},
		},

		// client is public and imports nothing of this repository.
		{name: "client", layer: -1, deny: []string{module, gin, raft, gossip, cobra, metrics}},

		// app knows the policies, whose words and parameters its files have.
		{name: "internal/app", layer: 0, deny: io(), also: []string{"routing"}},
		// state reads each application's spec once, for all its readers.
		{name: "internal/state", layer: 0, deny: io(), also: []string{"internal/app"}},
		{name: "placement", layer: 0, deny: io()},
		{name: "internal/rollout", layer: 0, deny: io()},
		{name: "internal/steptime", layer: 0, deny: io()},
		{name: "routing", layer: 0, deny: io(), also: []string{"internal/steptime"}},
		// the life of one request
		{name: "internal/dispatch", layer: 0, deny: io(), also: []string{"routing"}},
		{name: "internal/enginemodel", layer: 0, deny: io(), also: []string{"internal/steptime"}},
		{
			name: "internal/simulate", layer: 0, deny: io(),
			also: []string{"internal/steptime", "routing", "internal/enginemodel"},
		},
		// the pages of metrics that engines write
		{name: "internal/promtext", layer: 0, deny: io()},
		// the checks; what they look at is collected by its folder host
		{name: "internal/doctor", layer: 0, deny: io()},

		{name: "actors/msg", layer: 1, deny: io()},
		{name: "internal/engine", layer: 1, deny: []string{actorLib, gin, raft, gossip, cobra}},
		{name: "internal/proto", layer: 1, deny: []string{actorLib, gin, raft, gossip, cobra}},
		{
			name: "internal/cluster", layer: 1, also: []string{"internal/proto"},
			deny: []string{actorLib, gin, cobra},
		},
		{
			name: "internal/rankleg", layer: 1, also: []string{"actors/msg", "internal/engine"},
			deny: []string{actorLib, gin, raft, gossip, cobra},
		},
		{
			name: "internal/routerapi", layer: 1,
			also: []string{"actors/msg", "internal/engine", "internal/rankleg"},
			deny: []string{actorLib, gin, raft, gossip, cobra},
		},
		{name: "internal/telemetry", layer: 1, deny: []string{actorLib, gin, raft, gossip, cobra}},
		{name: "internal/tracing", layer: 1, deny: []string{actorLib, gin, raft, gossip, cobra}},
		{
			name: "internal/access", layer: 1, also: []string{"internal/telemetry"},
			deny: []string{actorLib, gin, raft, gossip, cobra},
		},
		{name: "internal/tracefile", layer: 1, deny: []string{actorLib, gin, raft, gossip, cobra}},
		{name: "internal/loadgen", layer: 1, deny: []string{actorLib, gin, raft, gossip, cobra}},

		{
			name: "actors/ingress", layer: 2, also: []string{"actors/msg", "actors/pdproxy"},
			deny: []string{raft, gossip, cobra},
		},
		{name: "actors/dpserver", layer: 2, deny: thin},
		{name: "actors/pdproxy", layer: 2, deny: []string{gin, raft, gossip, cobra}},
		{name: "actors/rankassigner", layer: 2, deny: thin},
		{name: "actors/controller", layer: 2, also: []string{"actors/rankassigner"}, deny: thin},
		{name: "actors/node", layer: 2, deny: thin},
		{name: "internal/noderpc", layer: 2, deny: []string{gin, raft, gossip, cobra}},
		{name: "internal/api", layer: 2, deny: []string{raft, gossip, cobra, actorLib}},
		{name: "internal/doctor/host", layer: 2, deny: []string{gin, raft, gossip, cobra, actorLib}},

		{name: "internal/server", layer: 3, deny: []string{cobra}},
		{
			name: "cmd/dpserve", layer: 3, also: []string{"internal/server"},
			deny: []string{gin, raft, gossip, actorLib},
		},

		{name: "examples", layer: 4},
		{name: "test", layer: 4, also: []string{"test"}},
	}
}

// isPure says that an area decides without a clock, a global random source or a goroutine.
func (a area) isPure() bool { return a.layer == 0 }

// pureLibraries lists what a pure area may link beside the standard library: parsers and hashes.
func pureLibraries() []string {
	return []string{
		"github.com/goccy/go-yaml", "github.com/zeebo/xxh3", "golang.org/x/exp/",
		"golang.org/x/text/",
	}
}

// pureHelpers lists the packages of internal/ that a pure area may import.
func pureHelpers() []string {
	return []string{
		"internal/problem", "internal/nearest", "internal/share", "internal/simflags", "internal/engineflags",
	}
}

// testLibraries lists what only tests and test/ may link.
func testLibraries() []string {
	return []string{
		"testing", "testing/", "net/http/httptest", "github.com/stretchr/testify", "go.uber.org/goleak",
		"pgregory.net/rapid", "github.com/rogpeppe/go-internal", "github.com/anishathalye/porcupine",
		"github.com/cockroachdb/datadriven", "github.com/openai/openai-go",
		"github.com/santhosh-tekuri/jsonschema", "github.com/creack/pty", module + "test",
	}
}

// areaOf returns the area of a folder (slash separated, relative to the module).
func areaOf(folder string) (area, bool) {
	var best area
	found := false
	for _, a := range areas() {
		if isWithin(folder, a.name) && (!found || len(a.name) > len(best.name)) {
			best, found = a, true
		}
	}
	return best, found
}

// isWithin says that path is name or lies below it.
func isWithin(path, name string) bool {
	return path == name || strings.HasPrefix(path, name+"/")
}

// matchesAny says that an import is one of the patterns: equal to it, or below a pattern that ends in a slash
// or names a module.
func matchesAny(path string, patterns []string) bool {
	for _, p := range patterns {
		if path == p || strings.HasSuffix(p, "/") && strings.HasPrefix(path, p) {
			return true
		}
		if strings.Contains(p, ".") && strings.HasPrefix(path, p) {
			return true
		}
	}
	return false
}
