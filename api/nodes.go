package api

import (
	"context"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/actors/msg"
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
	DefaultTokenTTL  = time.Hour
	maxTokenTTL      = 30 * 24 * time.Hour
	maxTokenUses     = 1024
	defaultTokenUses = 1
)

// Nodes is what the admin API needs of the cluster. Safe for concurrent use; a method ends when its ctx does. Errors that users can
// act on are *problem.Error.
type Nodes interface {
	// Nodes lists every node, by name.
	Nodes(ctx context.Context) ([]msg.NodeStatus, error)
	// Drain moves a node's ranks elsewhere and gives it no new ones, until Undrain. It returns once that is committed. deadline bounds
	// running streams; nil = each application's graceful_shutdown_timeout_s.
	Drain(ctx context.Context, node string, deadline *time.Duration) error
	// Undrain ends a drain.
	Undrain(ctx context.Context, node string) error
	// CheckLeave says whether a node could be removed if it were drained, and changes nothing.
	CheckLeave(ctx context.Context, node string) error
	// Remove forgets a node for good: a drained one, or one that is lost. A removal that is refused changes nothing.
	Remove(ctx context.Context, node string) error
	// NewToken makes a token that lets nodes join.
	NewToken(ctx context.Context, req TokenRequest) (Token, error)
	// RotateKey begins to give the gossip a new key, which takes some renewals of every node's lease.
	RotateKey(ctx context.Context) error
	// KeyRotation says how far that is.
	KeyRotation(ctx context.Context) (KeyRotation, error)
}

// KeyRotation is how far a change of the gossip key is.
type KeyRotation struct {
	Done    bool     `json:"done"`
	Waiting []string `json:"waiting,omitempty"` // nodes that have not taken the present step
}

// TokenRequest says what a join token is good for.
type TokenRequest struct {
	TTL  time.Duration
	Uses int // nodes
}

// Token lets nodes join.
type Token struct {
	Token   string    `json:"token"`
	Address string    `json:"address"` // HOST:PORT of a node port to join at
	Uses    int       `json:"uses"`
	Expires time.Time `json:"expires"`
}

// NodesReply answers GET /api/v1/nodes.
type NodesReply struct {
	Envelope
	Nodes []msg.NodeStatus `json:"nodes"`
}

// NodeReply answers what changes one node.
type NodeReply struct {
	Envelope
	Node   string `json:"node"`
	Status string `json:"status"` // DRAINING | ALIVE | REMOVABLE | REMOVED
}

// TokenReply answers POST /api/v1/join-tokens.
type TokenReply struct {
	Envelope
	Token
}

// KeyRotationReply answers POST and GET /api/v1/gossip-key.
type KeyRotationReply struct {
	Envelope
	KeyRotation
}

// nodes adds the paths of the Nodes.
func (s *Server) nodes(g *gin.Engine) {
	if s.cfg.Nodes == nil {
		return
	}
	g.GET(pathNodes, s.reply(s.listNodes))
	g.DELETE(pathNodes+"/:node", s.reply(s.removeNode))
	g.GET(pathNodes+"/:node"+pathRemoval, s.reply(s.checkLeave))
	g.POST(pathNodes+"/:node"+pathDrain, s.reply(s.drainNode))
	g.DELETE(pathNodes+"/:node"+pathDrain, s.reply(s.undrainNode))
	g.POST(pathJoinTokens, s.reply(s.newToken))
	g.POST(pathGossipKey, s.reply(s.rotateKey))
	g.GET(pathGossipKey, s.reply(s.keyRotation))
}

func (s *Server) rotateKey(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	err := s.cfg.Nodes.RotateKey(c.Request.Context())
	return http.StatusAccepted, KeyRotationReply{Envelope: Envelope{APIVersion}}, err
}

func (s *Server) keyRotation(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	r, err := s.cfg.Nodes.KeyRotation(c.Request.Context())
	return http.StatusOK, KeyRotationReply{Envelope{APIVersion}, r}, err
}

func (s *Server) listNodes(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	nodes, err := s.cfg.Nodes.Nodes(c.Request.Context())
	if nodes == nil {
		nodes = []msg.NodeStatus{}
	}
	return http.StatusOK, NodesReply{Envelope{APIVersion}, nodes}, err
}

func (s *Server) drainNode(c *gin.Context) (int, any, error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "deadline")
	if err != nil {
		return 0, nil, err
	}
	deadline, err := q.duration("deadline")
	if err != nil {
		return 0, nil, err
	}
	name := c.Param("node")
	err = s.cfg.Nodes.Drain(c.Request.Context(), name, deadline)
	return http.StatusAccepted, NodeReply{Envelope{APIVersion}, name, "DRAINING"}, err
}

func (s *Server) undrainNode(c *gin.Context) (int, any, error) {
	return s.changeNode(c, s.cfg.Nodes.Undrain, "ALIVE")
}

func (s *Server) removeNode(c *gin.Context) (int, any, error) {
	return s.changeNode(c, s.cfg.Nodes.Remove, "REMOVED")
}

func (s *Server) checkLeave(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	name := c.Param("node")
	err := s.cfg.Nodes.CheckLeave(c.Request.Context(), name)
	return http.StatusOK, NodeReply{Envelope{APIVersion}, name, "REMOVABLE"}, err
}

func (s *Server) changeNode(c *gin.Context, change func(ctx context.Context, node string) error, status string) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	name := c.Param("node")
	err := change(c.Request.Context(), name)
	return http.StatusAccepted, NodeReply{Envelope{APIVersion}, name, status}, err
}

func (s *Server) newToken(c *gin.Context) (int, any, error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "ttl", "uses")
	if err != nil {
		return 0, nil, err
	}
	req := TokenRequest{TTL: DefaultTokenTTL}
	ttl, err := q.duration("ttl")
	if err != nil {
		return 0, nil, err
	}
	if ttl != nil {
		req.TTL = *ttl
	}
	if req.TTL <= 0 || req.TTL > maxTokenTTL {
		return 0, nil, badValue("ttl", req.TTL.String(), "write a duration up to "+maxTokenTTL.String())
	}
	if req.Uses, err = q.number("uses", defaultTokenUses, maxTokenUses); err != nil {
		return 0, nil, err
	}
	if req.Uses == 0 {
		return 0, nil, problem.New(problem.InvalidArgument, "a token for no node is of no use").WithHint("uses is from 1 to %d", maxTokenUses)
	}
	t, err := s.cfg.Nodes.NewToken(c.Request.Context(), req)
	return http.StatusCreated, TokenReply{Envelope{APIVersion}, t}, err
}
