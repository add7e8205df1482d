package server

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/problem"
)

// loopCheckTime is how long AddRank waits for the answer of a new rank's URL. An engine that does not answer
// in this time is added, because it may start later.
const loopCheckTime = time.Second

// pseudonymLength is how many characters of the cluster's id are in the header Via.
const pseudonymLength = 8

// pseudonym names the cluster in the header Via of requests to engines. It has the cluster's id, because
// nodes of two clusters may have one name, and a request may pass through both.
func pseudonym(n *Node) string {
	id := n.store.ClusterID()
	return "dpserve-" + id[:min(len(id), pseudonymLength)]
}

// viaProbes is the transport for probes of engines. They have the cluster's name in the header Via, so an
// attached URL that is one of this cluster's own ingresses never becomes ready.
func viaProbes(n *Node) http.RoundTripper { return viaTransport{n.probes, "1.1 " + pseudonym(n)} }

// viaTransport adds the header Via.
type viaTransport struct {
	inner http.RoundTripper
	via   string
}

// RoundTrip implements http.RoundTripper.
func (t viaTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header["Via"] = []string{t.via}
	return t.inner.RoundTrip(r)
}

// checkLoop refuses a new rank, as for controller.AttachedRanks.Add, whose URL is this cluster's own.
func checkLoop(ctx context.Context, n *Node, rank []byte) error {
	var r struct {
		URL string `yaml:"url"`
	}
	if yaml.Unmarshal(rank, &r) != nil {
		return nil // Add says what is wrong
	}
	ctx, cancel := context.WithTimeout(ctx, loopCheckTime)
	defer cancel()
	_, err := engine.NewClient(r.URL, engine.Addressing{}, nil, viaProbes(n)).Health(ctx)
	if !errors.Is(err, engine.ErrLoop) {
		return nil
	}
	return problem.New(problem.InvalidArgument, "cannot attach %s: %w", r.URL, err).
		WithHint("give the URL of an engine, or of a dpserve of another cluster")
}
