package api

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// The paths of the cluster's nodes.
const (
	pathNodes      = "/api/v1/nodes"
	pathJoinTokens = "/api/v1/join-tokens" //nolint:gosec // a path
	pathGossipKey  = "/api/v1/gossip-key"
	pathRestart    = "/api/v1/restart" // of the node that answers
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
	// Tokens lists the tokens, without their secrets.
	Tokens(ctx context.Context) ([]client.JoinToken, error)
	// RevokeToken ends a token; "" = all of them.
	RevokeToken(ctx context.Context, id string) error
	// RotateKey replaces the gossip key. It names the nodes that have not taken it within a lease.
	RotateKey(ctx context.Context) (behind []string, err error)
}

// Restarts replaces the process of the node that answers, while its engines run.
type Restarts interface {
	// Restart returns before the process is replaced, with the version of the next one. Conflict: that cannot
	// be done. Unavailable: no leader answers, and force is not set.
	Restart(ctx context.Context, force bool) (next string, err error)
	// Process names the present process.
	Process() string
}

// restartHandlers answers the path of restarts.
type restartHandlers struct {
	restarts Restarts
	build    client.BuildInfo
}

// addRoutes registers the path.
func (h restartHandlers) addRoutes(g *gin.Engine, reply replier) {
	g.POST(pathRestart, reply(h.restart, "force"))
	g.GET(pathRestart, reply(h.process))
}

func (h restartHandlers) restart(c *gin.Context, q query) (int, any, error) {
	force, err := q.flag("force")
	if err != nil {
		return 0, nil, err
	}
	next, err := h.restarts.Restart(c.Request.Context(), force)
	if err != nil {
		return 0, nil, err
	}
	p := h.describeProcess()
	p.Next = next
	return http.StatusAccepted, p, nil
}

func (h restartHandlers) process(*gin.Context, query) (int, any, error) {
	return http.StatusOK, h.describeProcess(), nil
}

func (h restartHandlers) describeProcess() client.Process {
	return client.Process{Node: h.build.Node, Process: h.restarts.Process(), Version: h.build.Version}
}

// nodeReply answers requests that change or check one node.
type nodeReply struct {
	Node   string `json:"node"`
	Status string `json:"status"` // DRAINING | ALIVE | REMOVABLE | REMOVED
}

// tokenReply answers the revocation of a token.
type tokenReply struct {
	ID     string `json:"id"` // all: every token
	Status string `json:"status"`
}

// nodeHandlers answers the paths of the cluster's nodes.
type nodeHandlers struct{ nodes Nodes }

// addRoutes registers the paths.
func (h nodeHandlers) addRoutes(g *gin.Engine, reply replier) {
	const one = pathNodes + "/:node"
	g.GET(pathNodes, reply(h.listNodes))
	g.DELETE(one, reply(changeNode(h.nodes.Remove, http.StatusAccepted, "REMOVED")))
	g.GET(one+"/removal", reply(changeNode(h.nodes.CheckLeave, http.StatusOK, "REMOVABLE")))
	g.POST(one+"/drain", reply(h.drainNode, "deadline"))
	g.DELETE(one+"/drain", reply(changeNode(h.nodes.Undrain, http.StatusAccepted, "ALIVE")))
	g.POST(pathJoinTokens, reply(h.newToken, "ttl", "uses", "roles"))
	g.GET(pathJoinTokens, reply(h.listTokens))
	g.DELETE(pathJoinTokens, reply(h.revokeAllTokens, "all"))
	g.DELETE(pathJoinTokens+"/:token", reply(h.revokeToken))
	g.POST(pathGossipKey, reply(h.rotateKey))
}

func (h nodeHandlers) rotateKey(c *gin.Context, _ query) (int, any, error) {
	behind, err := h.nodes.RotateKey(c.Request.Context())
	return http.StatusOK, client.KeyRotation{Behind: behind}, err
}

func (h nodeHandlers) listNodes(c *gin.Context, _ query) (int, any, error) {
	nodes, err := h.nodes.Nodes(c.Request.Context())
	return http.StatusOK, gin.H{"nodes": notNull(nodes)}, err
}

func (h nodeHandlers) drainNode(c *gin.Context, q query) (int, any, error) {
	deadline, err := q.duration("deadline")
	if err != nil {
		return 0, nil, err
	}
	name := c.Param("node")
	err = h.nodes.Drain(c.Request.Context(), name, deadline)
	return http.StatusAccepted, nodeReply{name, "DRAINING"}, err
}

// changeNode makes a handler that changes or checks the node of the path.
func changeNode(change func(ctx context.Context, node string) error, code int, status string) answer {
	return func(c *gin.Context, _ query) (int, any, error) {
		name := c.Param("node")
		return code, nodeReply{name, status}, change(c.Request.Context(), name)
	}
}

func (h nodeHandlers) newToken(c *gin.Context, q query) (int, any, error) {
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
	if req.Roles, err = parseRoles(q.values.Get("roles")); err != nil {
		return 0, nil, err
	}
	t, err := h.nodes.NewToken(c.Request.Context(), req)
	return http.StatusCreated, t, err
}

// parseRoles reads a list of roles of nodes; "" is none.
func parseRoles(text string) ([]string, error) {
	if text == "" {
		return nil, nil
	}
	known := []string{string(state.RoleControl), string(state.RoleWorker), string(state.RoleIngress)}
	roles := strings.Split(text, ",")
	for i, r := range roles {
		if !slices.Contains(known, r) || slices.Contains(roles[:i], r) {
			return nil, badValueError("roles", text, "write some of "+strings.Join(known, ",")+", each once")
		}
	}
	return roles, nil
}

func (h nodeHandlers) listTokens(c *gin.Context, _ query) (int, any, error) {
	tokens, err := h.nodes.Tokens(c.Request.Context())
	return http.StatusOK, gin.H{"tokens": notNull(tokens)}, err
}

func (h nodeHandlers) revokeToken(c *gin.Context, _ query) (int, any, error) {
	id := c.Param("token")
	return http.StatusOK, tokenReply{id, "REVOKED"}, h.nodes.RevokeToken(c.Request.Context(), id)
}

func (h nodeHandlers) revokeAllTokens(c *gin.Context, q query) (int, any, error) {
	if all, err := q.flag("all"); err != nil || !all {
		return 0, nil, cmp.Or(err, error(problem.New(problem.InvalidArgument, "no token is named").
			WithHint("add its id to the path, or all=true for every token")))
	}
	return http.StatusOK, tokenReply{"all", "REVOKED"}, h.nodes.RevokeToken(c.Request.Context(), "")
}
