package api

import (
	"context"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
)

// The paths of the cluster's nodes.
const (
	pathNodes      = "/api/v1/nodes"
	pathDrain      = "/drain"              // behind pathNodes/NODE
	pathRemoval    = "/removal"            // behind pathNodes/NODE
	pathJoinTokens = "/api/v1/join-tokens" //nolint:gosec // a path
	pathGossipKey  = "/api/v1/gossip-key"
)

// Bounds of a join token.
const (
	maxTokenTTL      = 30 * 24 * time.Hour
	maxTokenUses     = 1024
	defaultTokenUses = 1
)

// Nodes is the part of the cluster that the admin API needs. Implementations are safe for concurrent use, and
// a method returns when its ctx ends. Errors that users can act on are *problem.Error.
type Nodes interface {
	// Nodes lists every node, by name.
	Nodes(ctx context.Context) ([]client.NodeStatus, error)
	// Drain moves a node's ranks to other nodes and assigns it no new ones until Undrain. It returns once
	// that is committed. deadline bounds running streams; nil = each application's
	// graceful_shutdown_timeout_s.
	Drain(ctx context.Context, node string, deadline *time.Duration) error
	// Undrain ends a drain.
	Undrain(ctx context.Context, node string) error
	// CheckLeave returns nil if the node could be removed after a drain. It changes nothing.
	CheckLeave(ctx context.Context, node string) error
	// Remove removes a drained or lost node for good. A refused removal changes nothing.
	Remove(ctx context.Context, node string) error
	// NewToken makes a token that lets nodes join.
	NewToken(ctx context.Context, req client.TokenRequest) (client.Token, error)
	// RotateKey starts a change of the gossip key, which takes several lease renewals of every node.
	RotateKey(ctx context.Context) error
	// KeyRotation returns the progress of the change.
	KeyRotation(ctx context.Context) (client.KeyRotation, error)
}

// nodesReply answers GET /api/v1/nodes.
type nodesReply struct {
	envelope
	Nodes []client.NodeStatus `json:"nodes"`
}

// nodeReply answers requests that change or check one node.
type nodeReply struct {
	envelope
	Node   string `json:"node"`
	Status string `json:"status"` // DRAINING | ALIVE | REMOVABLE | REMOVED
}

// tokenReply answers POST /api/v1/join-tokens.
type tokenReply struct {
	envelope
	client.Token
}

// keyRotationReply answers POST and GET /api/v1/gossip-key.
type keyRotationReply struct {
	envelope
	client.KeyRotation
}

// nodeHandlers answers the paths of the cluster's nodes.
type nodeHandlers struct{ nodes Nodes }

// addRoutes registers the paths.
func (h nodeHandlers) addRoutes(g *gin.Engine, reply func(answer) gin.HandlerFunc) {
	g.GET(pathNodes, reply(h.listNodes))
	g.DELETE(pathNodes+"/:node", reply(h.removeNode))
	g.GET(pathNodes+"/:node"+pathRemoval, reply(h.checkLeave))
	g.POST(pathNodes+"/:node"+pathDrain, reply(h.drainNode))
	g.DELETE(pathNodes+"/:node"+pathDrain, reply(h.undrainNode))
	g.POST(pathJoinTokens, reply(h.newToken))
	g.POST(pathGossipKey, reply(h.rotateKey))
	g.GET(pathGossipKey, reply(h.keyRotation))
}

func (h nodeHandlers) rotateKey(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	err := h.nodes.RotateKey(c.Request.Context())
	return http.StatusAccepted, keyRotationReply{envelope: envelope{client.APIVersion}}, err
}

func (h nodeHandlers) keyRotation(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	r, err := h.nodes.KeyRotation(c.Request.Context())
	return http.StatusOK, keyRotationReply{envelope{client.APIVersion}, r}, err
}

func (h nodeHandlers) listNodes(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	nodes, err := h.nodes.Nodes(c.Request.Context())
	if nodes == nil {
		nodes = []client.NodeStatus{}
	}
	return http.StatusOK, nodesReply{envelope{client.APIVersion}, nodes}, err
}

func (h nodeHandlers) drainNode(c *gin.Context) (int, any, error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "deadline")
	if err != nil {
		return 0, nil, err
	}
	deadline, err := q.duration("deadline")
	if err != nil {
		return 0, nil, err
	}
	name := c.Param("node")
	err = h.nodes.Drain(c.Request.Context(), name, deadline)
	return http.StatusAccepted, nodeReply{envelope{client.APIVersion}, name, "DRAINING"}, err
}

func (h nodeHandlers) undrainNode(c *gin.Context) (int, any, error) {
	return h.changeNode(c, h.nodes.Undrain, "ALIVE")
}

func (h nodeHandlers) removeNode(c *gin.Context) (int, any, error) {
	return h.changeNode(c, h.nodes.Remove, "REMOVED")
}

func (h nodeHandlers) checkLeave(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	name := c.Param("node")
	err := h.nodes.CheckLeave(c.Request.Context(), name)
	return http.StatusOK, nodeReply{envelope{client.APIVersion}, name, "REMOVABLE"}, err
}

func (h nodeHandlers) changeNode(c *gin.Context, change func(ctx context.Context, node string) error,
	status string,
) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	name := c.Param("node")
	err := change(c.Request.Context(), name)
	return http.StatusAccepted, nodeReply{envelope{client.APIVersion}, name, status}, err
}

func (h nodeHandlers) newToken(c *gin.Context) (int, any, error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "ttl", "uses")
	if err != nil {
		return 0, nil, err
	}
	req := client.TokenRequest{TTL: client.DefaultTokenTTL}
	ttl, err := q.duration("ttl")
	if err != nil {
		return 0, nil, err
	}
	if ttl != nil {
		req.TTL = *ttl
	}
	if req.TTL <= 0 || req.TTL > maxTokenTTL {
		return 0, nil, badValueError("ttl", req.TTL.String(), "write a duration up to "+maxTokenTTL.String())
	}
	if req.Uses, err = q.number("uses", defaultTokenUses, maxTokenUses); err != nil {
		return 0, nil, err
	}
	if req.Uses == 0 {
		return 0, nil, problem.New(problem.InvalidArgument, "a token for no node is of no use").
			WithHint("uses is from 1 to %d", maxTokenUses)
	}
	t, err := h.nodes.NewToken(c.Request.Context(), req)
	return http.StatusCreated, tokenReply{envelope{client.APIVersion}, t}, err
}
