package house_test

import "strings"

// module is the path every import inside the repository begins with.
const module = "github.com/dpserve/dpserve/"

// room is one row of the floor table.
type room struct {
	name  string   // folder, subfolders included
	floor int      // -1 below all, 4 tests
	also  []string // rooms that may be imported although they are not below
	deny  []string // import path prefixes that are refused, whatever the floor
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

// io is what "anything with IO" means for a pure room and for actors/msg.
func io() []string {
	return []string{
		"net", "net/http", "net/http/", "net/rpc", "net/smtp", "os", "os/", "syscall", "golang.org/x/sys/", "io/ioutil", "embed", "plugin",
		"log", "log/", "expvar", "runtime/pprof", "runtime/trace", "testing",
		gin, raft, gossip, cobra, actorLib, metrics, "google.golang.org/grpc", "go.opentelemetry.io/",
	}
}

// rooms is the floor table. Every folder with Go code belongs to the row with the longest matching name; a folder without a
// row fails the test, so that a new room is put on its floor knowingly.
func rooms() []room {
	thin := []string{gin}
	return []room{
		{name: "internal", floor: -1, deny: []string{gin, raft, gossip, cobra}},

		{name: "client", floor: -1, deny: []string{module, gin, raft, gossip, cobra, metrics}}, // public: stands alone

		{name: "app", floor: 0, deny: io()},
		{name: "state", floor: 0, deny: io()},
		{name: "placement", floor: 0, deny: io()},
		{name: "steptime", floor: 0, deny: io()},
		{name: "routing", floor: 0, deny: io(), also: []string{"steptime"}},
		{name: "enginemodel", floor: 0, deny: io(), also: []string{"steptime"}},

		{name: "actors/msg", floor: 1, deny: io()},
		{name: "engine", floor: 1, deny: []string{actorLib, gin, raft, gossip, cobra}},
		{name: "proto", floor: 1, deny: []string{actorLib, gin, raft, gossip, cobra}},
		{name: "cluster", floor: 1, also: []string{"proto"}, deny: []string{actorLib, gin, cobra}},
		{name: "telemetry", floor: 1, deny: []string{actorLib, gin, raft, gossip, cobra}},
		{name: "loadgen", floor: 1, deny: []string{actorLib, gin, raft, gossip, cobra}},

		{name: "actors/ingress", floor: 2, also: []string{"actors/msg"}, deny: []string{raft, gossip, cobra}},
		{name: "actors/dpserver", floor: 2, deny: thin},
		{name: "actors/rankassigner", floor: 2, deny: thin},
		{name: "actors/controller", floor: 2, deny: thin},
		{name: "actors/node", floor: 2, deny: thin},
		{name: "actors/remote", floor: 2, deny: []string{gin, raft, gossip, cobra}},
		{name: "api", floor: 2, deny: []string{raft, gossip, cobra, actorLib}},

		{name: "wiring", floor: 3, deny: []string{cobra}},
		{name: "cmd/dpserve", floor: 3, also: []string{"wiring"}, deny: []string{gin, raft, gossip, actorLib}},

		{name: "examples", floor: 4},
		{name: "test", floor: 4, also: []string{"test"}},
	}
}

// pure says that a room decides without a clock, a global random source or a goroutine.
func (r room) pure() bool { return r.floor == 0 }

// libraries a pure room may link beside the standard library: parsers and hashes, which compute and do nothing else.
func pureLibraries() []string {
	return []string{"github.com/goccy/go-yaml", "github.com/twmb/murmur3", "github.com/zeebo/xxh3", "golang.org/x/exp/", "golang.org/x/text/"}
}

// testLibraries may be linked by tests and by test/ alone.
func testLibraries() []string {
	return []string{
		"testing", "testing/", "net/http/httptest", "github.com/stretchr/testify", "go.uber.org/goleak", "pgregory.net/rapid",
		"github.com/rogpeppe/go-internal", "github.com/anishathalye/porcupine", "github.com/cockroachdb/datadriven", "github.com/openai/openai-go",
		module + "test",
	}
}

// roomOf gives the room of a folder (slash separated, relative to the module).
func roomOf(folder string) (room, bool) {
	var best room
	found := false
	for _, r := range rooms() {
		if within(folder, r.name) && (!found || len(r.name) > len(best.name)) {
			best, found = r, true
		}
	}
	return best, found
}

// within says that path is name or lies below it.
func within(path, name string) bool {
	return path == name || strings.HasPrefix(path, name+"/")
}

// matches says that an import is one of the patterns: exact, or below a pattern that ends in a slash or names a module.
func matches(path string, patterns []string) bool {
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
